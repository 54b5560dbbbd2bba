"""The data-set columns of the hint and replay channels: what a row may hold, checked before training.

privileged_context   the hint: a string or messages; None for a row without one
chosen, rejected     one pair, or equal-length lists of pairs; a side is a string or messages
n_teachers_agreeing  optional weight >= 0 of the pair, or one per pair; None is 1
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError, DataError

HINT = "privileged_context"
CHOSEN, REJECTED, AGREEING = "chosen", "rejected", "n_teachers_agreeing"

Row = Mapping[str, Any]
Side = str | list[dict[str, Any]]


class Pair(NamedTuple):
    """Two completions of one prompt, and how much their order counts."""

    chosen: Side
    rejected: Side
    weight: float


def text_of(side: Side) -> str:
    """The text of a string, or of messages joined by line breaks."""
    return side if isinstance(side, str) else "\n".join(str(message["content"]) for message in side)


def hint_of(row: Row) -> str | None:
    """The row's hint as text, None if it has none."""
    value = row.get(HINT)
    if value is None:
        return None
    if not _is_side(value):
        raise DataError(f"{HINT} is {_short(value)}; wanted a string, messages, or None")
    text = text_of(value)
    if not text.strip():
        raise DataError(f"{HINT} is empty: write None for a row without a hint")
    return text


def pairs_of(row: Row) -> list[Pair]:
    """The row's pairs, in order; none is legal."""
    chosen, rejected = _sides(row, CHOSEN), _sides(row, REJECTED)
    if len(chosen) != len(rejected):
        raise DataError(f"{len(chosen)} chosen and {len(rejected)} rejected: pairs need one of each")
    for name, sides in ((CHOSEN, chosen), (REJECTED, rejected)):
        if any(not text_of(side).strip() for side in sides):
            raise DataError(f"a pair whose {name} side is empty: drop the pair, or write None for both")
    weights = _weights(row.get(AGREEING), len(chosen))
    return [Pair(*pair) for pair in zip(chosen, rejected, weights, strict=True)]


def rows_of(dataset: Any, columns: tuple[str, ...], weight: str, name: str) -> Iterator[tuple[str, Row]]:
    """Every row with a label for its errors, once the columns that `weight` needs are known to exist.

    A streamed data set is not read ahead: only its first row is yielded here, and each later one is
    checked as it arrives.
    """
    streamed = not hasattr(dataset, "__len__")
    rows = iter(dataset)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{name} is empty")
    for column in columns:
        if column not in first:
            raise ConfigError(
                f"{weight} > 0 needs the column {column!r}, and {name} has {', '.join(sorted(first))}: "
                f"add it (None in rows without one), or set {weight}=0"
            )
    yield f"{name} row 0", first
    if not streamed:
        yield from ((f"{name} row {i}", row) for i, row in enumerate(rows, start=1))


def _is_side(value: Any) -> bool:
    if isinstance(value, str):
        return True
    messages = isinstance(value, list) and len(value) > 0
    return messages and all(isinstance(m, Mapping) and "content" in m for m in value)


def _sides(row: Row, column: str) -> list[Side]:
    value = row.get(column)
    if value is None:
        return []
    if _is_side(value):
        return [value]
    if isinstance(value, list) and all(_is_side(side) for side in value):
        return value
    raise DataError(f"{column} is {_short(value)}; wanted a string, messages, a list of either, or None")


def _weights(value: Any, count: int) -> list[float]:
    weights = value if isinstance(value, list) else [value] * count
    if len(weights) != count:
        raise DataError(f"{len(weights)} values of {AGREEING} for {count} pairs")
    weights = [1.0 if w is None else w for w in weights]
    for w in weights:
        if not isinstance(w, int | float) or isinstance(w, bool) or not math.isfinite(w) or w < 0:
            raise DataError(f"{AGREEING} is {w!r}; wanted a finite number >= 0")
    return [float(w) for w in weights]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
