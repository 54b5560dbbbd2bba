"""What a run leaves in its folder: the pairs as parquet, a report, and a data card."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from composer_plugins.recipes.shared import replace_file
from composer_plugins.recipes.trace_replay.pairs import Counts, Pair

PAIRS, REPORT, CARD = "pairs.parquet", "report.md", "README.md"

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)])
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(CALL)),
        ("tool_call_id", pa.string()),
    ]
)
MESSAGES, TEXT, NUMBER = pa.list_(MESSAGE), pa.string(), pa.int64()
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


@dataclass(frozen=True)
class Costs:
    """What the journal says of a replay."""

    spent: float = 0.0  # USD
    answers: Counter[str] = field(default_factory=Counter)  # by teacher, 0 if it was asked in vain
    failures: Counter[str] = field(default_factory=Counter)  # by reason


def write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    """Write the parquet file."""
    schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
    table = pa.Table.from_pylist([pair._asdict() for pair in pairs], schema=schema)
    replace_file(path, lambda partial: pq.write_table(table, partial))


def report(run: dict[str, Any], counts: Counts, pairs: Sequence[Pair], costs: Costs) -> str:
    """The report as markdown. `run` is what the command `states` has recorded."""
    made = Counter(pair.made_by for pair in pairs)
    lines = ["# Trace replay: report", ""]
    lines += [f"{len(pairs)} pairs: {made['agreement']} by agreement, {made['outcome']} by outcome.", ""]
    lines += ["## Logs", "", f"- Logs: {', '.join(run['logs'])}", f"- Redaction: {run['redact']}"]
    lines += [f"- Tools: {run['tools']}", f"- States: {run['states']}"]
    lines += [f"- States without tools: {run['states_without_tools']}"]
    lines += [*(f"- Skipped: {file} ({why})" for file, why in run.get("skipped", {}).items()), ""]
    lines += _table("lines not read as messages", "number", run["lines"])
    lines += _table("actions left out", "number", run["actions"])
    lines += _table("secrets replaced", "different ones", run["secrets"])
    lines += ["## Answers", "", f"Spent: {costs.spent:.6f} USD.", ""]
    lines += _table("teacher", "answers", costs.answers, zeros=True)
    lines += _table("requests without an answer", "number", costs.failures)
    lines += _table("answers", "number", counts.answers)
    lines += ["## Agreement", "", f"- At least {run['min_agree']} teachers agree."]
    lines += [f"- Judge of texts: {run['judge'] or 'none'}."]
    lines += [f"- Arguments that are not compared: {run['ignored'] or 'none'}.", ""]
    agreement = {f"{most} of {voting}": number for (most, voting), number in sorted(counts.votes.items())}
    lines += _table("most votes for one action, of all votes", "states", agreement)
    lines += _table("what became of the actions of the traces", "number", counts.states)
    return "\n".join(lines)


def card(run: dict[str, Any], pairs: Sequence[Pair], costs: Costs) -> str:
    """The data card, with the head that the Hugging Face hub reads."""
    head = {
        "pretty_name": "Preference pairs of replayed traces",
        "task_categories": ["text-generation"],
        "tags": ["preference", "dpo", "agent", "trace-replay"],
        "configs": [{"config_name": "default", "data_files": PAIRS}],
    }
    removed = (
        "Secrets were replaced by `[REDACTED ...]`: those that the plugins of detect-secrets find. A value "
        "without quotes, such as `PASSWORD=value`, is still there, and so is a token of a form that they do "
        "not know."
    )
    redaction = removed if run["redact"] == "secrets" else "Nothing was redacted."
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", ""]
    lines += ["# Preference pairs of replayed traces", ""]
    lines += [
        f"{len(pairs)} pairs, made by `composer_plugins.recipes.trace_replay` from the log of an agent."
    ]
    lines += ["Several teachers were asked again at each point at which the agent acted:"]
    asked = ", ".join(f"{name} ({number} answers)" for name, number in sorted(costs.answers.items()))
    lines += [f"{asked or 'none'}.", "", "| column | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, (_, meaning) in COLUMNS.items()]
    lines += ["", "## Before you use it", ""]
    lines += [f"- {redaction} Names, paths and other personal data are still there."]
    lines += ["- A pair by agreement says that teachers disagree with the trace. They may be wrong."]
    lines += ["- The prompts are from the agent's model, and not from the model that you train."]
    lines += ["- The terms of the teachers' providers say whether a model may be trained on their answers."]
    return "\n".join([*lines, ""])


def _table(name: str, values: str, rows: Mapping[str, int], *, zeros: bool = False) -> list[str]:
    shown = sorted(
        ((key, one) for key, one in rows.items() if one or zeros), key=lambda row: (-row[1], row[0])
    )
    if not shown:
        return []
    return [f"| {name} | {values} |", "|---|---|", *(f"| {key} | {one} |" for key, one in shown), ""]
