"""`composer-plugins explain`: one loss on a page, its dialects side by side with the numbers they give."""

import inspect
import math

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_plugins.catalogue import Dialect, Loss, Parameter
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import Registry

# Positions of the example that are shown, [*batch, tokens]: the last is masked, and always 0.
SHOWN_TOKENS: list[tuple[int, ...]] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def find(registry: Registry, name: str, kind: str | None = None) -> list[tuple[Loss, Dialect | None]]:
    """The losses of that name, one of each kind that has it; "cispo@trl" finds the dialect."""
    base, at, upstream = name.partition("@")
    rows = [loss for loss in registry.losses if loss.name == base and kind in (None, loss.kind)]
    if not rows:
        raise unknown("loss", base, {loss.name for loss in registry.losses})
    if not at:
        return [(loss, None) for loss in rows]
    having = [loss for loss in rows if any(d.upstream == upstream for d in loss.dialects)]
    if not having:
        known = [f"{loss.name}@{d.upstream}" for loss in rows for d in loss.dialects]
        raise ConfigError(f"unknown dialect {name!r}; known: {', '.join(known) or 'none'}")
    return [(loss, loss.dialect(upstream)) for loss in having]


def print_page(console: Console, registry: Registry, loss: Loss, only: Dialect | None) -> None:
    """Everything the catalogue and the kernel's docstring say of a loss."""
    dialects = [only] if only else list(loss.dialects)
    console.print(Text(f"{loss.name}  ({loss.kind})", style="bold"))
    console.print(Text(loss.summary))
    console.print()
    console.print(Padding(Text(inspect.getdoc(loss.kernel()) or ""), (0, 0, 0, 2)))
    console.print()
    runs_in = [a.framework for a in registry.adapters if a.runs(loss)]
    facts = {
        "paper": loss.paper,
        "kernel": loss.path,
        "proof": loss.proof,
        "denominator": loss.mode,
        "batch": "a statistic of the whole batch: micro-batches change it" if loss.over_batch else "",
        "scores": "length-averaged log-probabilities" if loss.average else "",
        "runs in": ", ".join(runs_in) or "no framework here yet: call the kernel",
        "from": registry.origins[loss.kind, loss.name],
    }
    console.print(_grid([(label, text) for label, text in facts.items() if text]))
    console.print(_section("inputs", _inputs(loss)))
    if loss.parameters:
        console.print(_section("parameters", _parameters(loss, dialects)))
    for d in dialects:
        lines = [("source", d.source), ("proof", d.proof), *([("note", d.note)] if d.note else [])]
        console.print(_section(f"{loss.name}@{d.upstream}", _grid(lines)))
    console.print(_section("on the worked example", _numbers(loss, dialects)))


def _section(title: str, body: Table | Group) -> Group:
    return Group(Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _grid(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for label, text in rows:
        grid.add_row(label, Text(text))
    return grid


def _inputs(loss: Loss) -> Table:
    shown = [(n, f"{INPUTS[n].shape}  {INPUTS[n].help}") for n in loss.needs]
    return _grid(shown + [(n, f"{INPUTS[n].shape}  {INPUTS[n].help} (optional)") for n in loss.optional])


def _parameters(loss: Loss, dialects: list[Dialect]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True, style="dim")
    for heading in ("default", *(f"@{d.upstream}" for d in dialects)):
        table.add_column(heading)
    table.add_column("range")
    table.add_column("meaning")
    for name, parameter in loss.parameters.items():
        own = [str(d.params[name]) if name in d.params else d.counts.get(name, "") for d in dialects]
        table.add_row(name, str(parameter.default), *own, _range(parameter), Text(parameter.help))
    return table


def _range(parameter: Parameter) -> str:
    if parameter.choices:
        return " | ".join(map(str, parameter.choices))
    low = (
        "(-inf"
        if parameter.low == -math.inf
        else "(0"
        if 0 < parameter.low < 1e-300
        else f"[{parameter.low:g}"
    )
    return f"{low}, inf)" if parameter.high == math.inf else f"{low}, {parameter.high:g}]"


def _numbers(loss: Loss, dialects: list[Dialect]) -> Group:
    """A table to a quantity (the loss, its gradient), a column to a dialect; the inputs beside the first."""
    from composer_plugins.worked_example import run, tensors  # loads torch

    columns: list[Dialect | None] = [None, *dialects]
    given, results = tensors(loss), [run(loss, d) for d in columns]
    shown = {name: x for name, x in given.items() if name != "mask" and _flat(x)}
    tables = []
    for kind in results[0]:
        table = Table(box=None, pad_edge=False)
        table.add_column(kind, no_wrap=True, style="dim")
        for name in shown:
            table.add_column(name, justify="right", style="dim", overflow="fold")
        for d in columns:
            table.add_column(f"@{d.upstream}" if d else "default", justify="right", no_wrap=True)
        for position in _positions(results[0][kind].shape):
            label = ("", "row {}", "rollout {} token {}")[len(position)].format(*position)
            inputs = [_at(x, position) for x in shown.values()]
            table.add_row(label, *inputs, *(_at(result[kind], position) for result in results))
        tables.append(table)
        shown = {}
    return Group(*tables)


def _positions(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not shape:
        return [()]
    return [(i,) for i in range(shape[0])] if len(shape) == 1 else SHOWN_TOKENS


def _flat(x: object) -> bool:
    return getattr(x, "dim", lambda: 9)() <= 2


def _at(x: object, position: tuple[int, ...]) -> str:
    """One number of a tensor that broadcasts against the positions."""
    from torch import Tensor

    if not isinstance(x, Tensor) or x.dim() > len(position):
        return ""
    index = tuple(min(i, n - 1) for i, n in zip(position[len(position) - x.dim() :], x.shape, strict=True))
    return f"{x[index].item():.4g}"
