"""What `pairs` leaves in the folder of a run: the pairs as parquet, and a data card with all counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from composer_plugins.recipes.shared import replace_file
from composer_plugins.recipes.trace_replay.pairs import Pair

PAIRS, CARD = "pairs.parquet", "README.md"

TEXT, NUMBER = pa.string(), pa.int64()
FUNCTION = pa.struct({"name": TEXT, "arguments": TEXT})
CALL = pa.struct({"id": TEXT, "type": TEXT, "function": FUNCTION})
MESSAGE = {"role": TEXT, "content": TEXT, "tool_calls": pa.list_(CALL), "tool_call_id": TEXT}
MESSAGES = pa.list_(pa.struct(MESSAGE))
COLUMNS = {  # of the pairs: the type of each, and what it means
    "prompt": (MESSAGES, "the messages before the action"),
    "chosen": (MESSAGES, "one assistant message: what most teachers did, or what a better trace did"),
    "rejected": (MESSAGES, "one assistant message: the action of the trace"),
    "tools": (TEXT, "the tools as JSON text, or null"),
    "n_teachers_agreeing": (NUMBER, "how many teachers took the chosen action; null (weight 1) by outcome"),
    "n_teachers": (NUMBER, "how many teachers voted"),
    "made_by": (TEXT, "`agreement` of teachers, or `outcome` of traces"),
    "state": (TEXT, "the hash of messages and tools"),
    "source": (TEXT, "file and line of the trace's action"),
}
HEAD = {
    "pretty_name": "Preference pairs of replayed traces",
    "task_categories": ["text-generation"],
    "tags": ["preference", "dpo", "agent", "trace-replay"],
    "configs": [{"config_name": "default", "data_files": PAIRS}],
}
REDACTED = (
    "Secrets were replaced by `[REDACTED ...]`: those that the plugins of detect-secrets find. A value "
    "without quotes, such as `PASSWORD=value`, is still there, and so is a token of a form that they do "
    "not know."
)


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write the parquet file."""
    schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
    table = pa.Table.from_pylist([pair._asdict() for pair in pairs], schema=schema)
    replace_file(path, lambda partial: pq.write_table(table, partial))


def card(pairs: Sequence[Pair], *, is_redacted: bool, counts: Mapping[str, Mapping[str, int]]) -> str:
    """The data card, with the head that the Hugging Face hub reads, and with a table for each of `counts`."""
    made = Counter(pair.made_by for pair in pairs)
    lines = ["---", yaml.safe_dump(HEAD, sort_keys=False).strip(), "---", ""]
    lines += ["# Preference pairs of replayed traces", ""]
    lines += [
        f"{len(pairs)} pairs, {made['agreement']} by agreement and {made['outcome']} by outcome, made by "
        "`composer_plugins.recipes.trace_replay` from the log of an agent. Several teachers were asked again "
        "at each point at which the agent acted.",
        "",
        "| column | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, (_, meaning) in COLUMNS.items()]
    lines += ["", "## Before you use it", ""]
    lines += [f"- {REDACTED if is_redacted else 'Nothing was redacted.'}"]
    lines += ["- Names, paths and other personal data are still there."]
    lines += ["- A pair by agreement says that teachers disagree with the trace. They may be wrong."]
    lines += ["- The prompts are from the agent's model, and not from the model that you train."]
    lines += ["- The terms of the teachers' providers say whether a model may be trained on their answers."]
    for title, of_title in counts.items():
        if rows := (+Counter(of_title)).most_common():
            lines += ["", f"| {title} | number |", "|---|---|"]
            lines += [f"| {name} | {number} |" for name, number in rows]
    return "\n".join([*lines, ""])
