"""The worked example of a loss: what it was given, and what each dialect makes of it, as tables or data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from composer_plugins.cli.layout import BLANK, Column, entries, tables
from composer_plugins.cli.worked_example import examples, run, tensors
from composer_plugins.losses.choosing import of_row
from composer_plugins.losses.row import Dialect, Loss

# Positions of the example that are shown, [*batch, tokens]: the last is masked, and always 0.
SHOWN_TOKENS: list[tuple[int, ...]] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]

Results = dict[str, dict[str, Tensor]]  # by the name of a column ("default", "@trl"), then "loss", "gradient"


def results_of(loss: Loss, dialects: Sequence[Dialect]) -> Results:
    """What the loss gives with its defaults and in each dialect."""
    return {f"@{d.upstream}" if d else "default": run(of_row(loss, loss.name, d)) for d in (None, *dialects)}


def lines(loss: Loss, results: Results, width: int) -> list[RenderableType]:
    """A table to a quantity (the loss, its gradient), a column to a dialect; the inputs beside the first.

    An input that has more axes than the result stands above, whole.
    """
    first = next(iter(results.values()))
    above, beside = given_to(loss, first)
    values = ", ".join(f"{name}={value}" for name, value in examples(loss).items())
    shown: list[RenderableType] = (
        [Text(f"with {values} (no default: an example)", style="dim")] if values else []
    )
    shown += entries([(name, written(x)) for name, x in above.items()], width)
    for kind, x in first.items():
        positions = positions_of(x.shape)
        given = [_column(name, one, positions, "dim") for name, one in beside.items()]
        columns = [_column(name, result[kind], positions) for name, result in results.items()]
        label = Column(kind, [label_of(p) for p in positions], "dim")
        shown += [*([BLANK] if shown else []), *tables(label, [given, columns], width, "given")]
        beside = {}
    return shown


def given_to(loss: Loss, result: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The example's inputs: those with more axes than the result, and those that stand beside it."""
    axes = next(iter(result.values())).dim()
    flat = {name: x for name, x in tensors(loss).items() if isinstance(x, Tensor) and x.dim() <= 2}
    above = {name: x for name, x in flat.items() if x.dim() > axes and (name != "mask" or not axes)}
    return above, {name: x for name, x in flat.items() if x.dim() <= axes and name != "mask"}


def _column(heading: str, x: Tensor, positions: Sequence[tuple[int, ...]], style: str = "") -> Column:
    return Column(heading, [written(at(x, position)) for position in positions], style, right=True)


def as_data(loss: Loss, results: Results) -> dict[str, Any]:
    """The example as JSON can hold it: every input and result whole."""
    given = {name: number(x) for name, x in tensors(loss).items() if isinstance(x, Tensor)}
    shown = {name: {kind: number(x) for kind, x in result.items()} for name, result in results.items()}
    return {"parameters": examples(loss), "inputs": given, "results": shown}


def number(x: Tensor) -> Any:
    """A tensor as JSON can hold it: a number, or lists of them; "inf" and "nan" are strings."""
    if x.dim():
        return [number(one) for one in x]
    value = x.item() + 0.0 if x.is_floating_point() else x.item()  # -0.0 + 0.0 is 0.0
    return value if math.isfinite(value) else str(value)


def positions_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The positions of a result that are shown."""
    if not shape:
        return [()]
    return [(i,) for i in range(shape[0])] if len(shape) == 1 else SHOWN_TOKENS


def label_of(position: tuple[int, ...]) -> str:
    """A position in words."""
    return ("", "row {}", "rollout {} token {}")[len(position)].format(*position)


def at(x: Tensor, position: tuple[int, ...]) -> Tensor:
    """One number of a tensor that broadcasts against the positions."""
    return x[tuple(min(i, n - 1) for i, n in zip(position[len(position) - x.dim() :], x.shape, strict=True))]


def written(x: Tensor) -> str:
    """A tensor's numbers, as the page writes them."""
    if x.dim():
        return f"[{', '.join(map(written, x))}]"
    return f"{x.item() + 0.0:.4g}"  # -0.0 + 0.0 is 0.0
