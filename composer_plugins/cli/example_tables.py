"""The worked example of a loss as tables: what it was given, and what each dialect makes of it."""

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from composer_plugins.catalogue import Dialect, Loss
from composer_plugins.cli.worked_example import examples, run, tensors

# Positions of the example that are shown, [*batch, tokens]: the last is masked, and always 0.
SHOWN_TOKENS: list[tuple[int, ...]] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def tables(loss: Loss, dialects: list[Dialect]) -> Group:
    """A table to a quantity (the loss, its gradient), a column to a dialect; the inputs beside the first.

    An input that has more axes than the result stands above, whole.
    """
    columns: list[Dialect | None] = [None, *dialects]
    given, results = tensors(loss), [run(loss, d) for d in columns]
    axes = next(iter(results[0].values())).dim()
    flat = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dim() <= 2}
    above = {name: x for name, x in flat.items() if x.dim() > axes and (name != "mask" or not axes)}
    beside = {name: x for name, x in flat.items() if x.dim() <= axes and name != "mask"}
    shown: list[Group | Table] = [_given(loss, above)]
    for kind in results[0]:
        table = Table(box=None, pad_edge=False)
        table.add_column(kind, no_wrap=True, style="dim")
        for name in beside:
            table.add_column(name, justify="right", style="dim", overflow="fold")
        for d in columns:
            table.add_column(f"@{d.upstream}" if d else "default", justify="right", no_wrap=True)
        for position in _positions(results[0][kind].shape):
            label = ("", "row {}", "rollout {} token {}")[len(position)].format(*position)
            inputs = [_at(x, position) for x in beside.values()]
            table.add_row(label, *inputs, *(_at(result[kind], position) for result in results))
        shown.append(table)
        beside = {}
    return Group(*shown)


def _given(loss: Loss, inputs: dict[str, Tensor]) -> Group:
    grid = Table.grid(padding=(0, 2))
    for name, x in inputs.items():
        grid.add_row(Text(name, style="dim"), Text(_written(x), style="dim"))
    values = ", ".join(f"{name}={value}" for name, value in examples(loss).items())
    examples_line = [Text(f"with {values} (no default: an example)", style="dim")] if values else []
    return Group(*examples_line, *([grid] if inputs else []))


def _positions(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not shape:
        return [()]
    return [(i,) for i in range(shape[0])] if len(shape) == 1 else SHOWN_TOKENS


def _at(x: Tensor, position: tuple[int, ...]) -> str:
    """One number of a tensor that broadcasts against the positions."""
    index = tuple(min(i, n - 1) for i, n in zip(position[len(position) - x.dim() :], x.shape, strict=True))
    return _written(x[index])


def _written(x: Tensor) -> str:
    if x.dim():
        return f"[{', '.join(map(_written, x))}]"
    return f"{x.item():.4g}"
