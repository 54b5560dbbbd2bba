"""The pairs of a file that recipes/trace_replay has written, in the rows of a task."""

from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from composer_plugins.columns import AGREEING, CHOSEN, REJECTED
from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.shared import cut
from composer_plugins.recipes.smollm.tasks import Row, Task

OPTION = "--pairs"
COLUMNS = ("prompt", CHOSEN, REJECTED, AGREEING)


class PairedRows(NamedTuple):
    """The rows of a task with the pairs of a file."""

    rows: list[Row]
    digest: str  # of the file: 16 hex digits of its sha256


def read_pairs(file: Path, task: Task) -> PairedRows:
    """Return all rows of the task; those to whose prompts the file has pairs have them.

    Raises ConfigError for a file that is no file of pairs, and for one whose prompts are not the task's.
    """
    pairs, known = _rows_of(file), {_asked(row["prompt"]) for row in task.rows}
    by_prompt = defaultdict[Any, list[Row]](list)
    for pair in pairs:
        by_prompt[_asked(pair["prompt"])].append(pair)
    others = [asked for asked in by_prompt if asked not in known]
    if others:
        text = cut(repr(others[0][-1][1] if others[0] else ""), 60)
        problem = f"{len(others)} of {len(by_prompt)} prompts in {file} are no questions that the task "
        problem += f"{task.name} trains, the first is {text}"
        raise ConfigError(OPTION, problem, "give the file that over_http has written with the same --task")
    rows = [{**row, **_columns(by_prompt[_asked(row["prompt"])])} for row in task.rows]
    return PairedRows(rows, sha256(file.read_bytes()).hexdigest()[:16])


def _rows_of(file: Path) -> list[Row]:
    """The rows of a parquet file."""
    remedy = "give the pairs.parquet that over_http or trace_replay has written"
    try:
        rows: list[Row] = pq.read_table(file, columns=list(COLUMNS)).to_pylist()
        for row in rows:
            _asked(row["prompt"])
            if not all(_text(row[side]).strip() for side in (CHOSEN, REJECTED)):
                raise ValueError("a completion is empty")
    except (OSError, pa.ArrowException, TypeError, LookupError, AttributeError, ValueError) as error:
        problem = f"{file} has no pairs that can be read ({in_a_line(error, most=120)})"
        raise ConfigError(OPTION, problem, remedy) from None
    if not rows:
        raise ConfigError(OPTION, f"{file} has no pairs", remedy)
    return rows


def _asked(prompt: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """A prompt as something to compare: the role and the text of each message."""
    return tuple((message["role"], message["content"]) for message in prompt)


def _columns(pairs: list[Row]) -> Row:
    """The columns of the replay channel for the pairs of one prompt, each None if there is no pair."""
    if not pairs:
        return dict.fromkeys((CHOSEN, REJECTED, AGREEING))
    sides = {side: [_text(pair[side]) for pair in pairs] for side in (CHOSEN, REJECTED)}
    weights = [1.0 if pair[AGREEING] is None else float(pair[AGREEING]) for pair in pairs]
    return {**sides, AGREEING: weights}


def _text(side: list[dict[str, Any]]) -> str:
    """The text of a completion of one message."""
    (message,) = side
    text = message["content"]
    if not isinstance(text, str) or message.get("tool_calls"):
        raise ValueError("a completion is not a text alone")
    return text
