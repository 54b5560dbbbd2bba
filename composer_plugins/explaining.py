"""`composer-plugins explain`: one loss on a page, its dialects side by side with the numbers they give."""

import inspect

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_plugins.catalogue import Dialect, Loss, Parameter, check_kind, unknown_loss
from composer_plugins.errors import ConfigError, in_a_line, near, spelling, unknown
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import Problem, Registry

# Names that people type and that are no rows: where what they mean is.
PARTS = {
    "wpo": "weighs each pair: wpo_weights and weighted in composer_plugins.kernels.preference, around any "
    "preference loss",
    "ld_dpo": "scores a completion: ld_logprobs in composer_plugins.kernels.preference, for dpo",
    "bnpo": "is TRL's name for grpo@trl with the denominator token-mean@trl, counted in each micro-batch",
}


def find(registry: Registry, name: str, kind: str | None = None) -> list[tuple[Loss, Dialect | None]]:
    """The losses of that name, one of each kind that has it; "cispo@trl" finds the dialect."""
    if kind is not None:
        check_kind(kind)
    base, at, upstream = name.partition("@")
    rows = [loss for loss in registry.losses if loss.name == base and kind in (None, loss.kind)]
    if not rows:
        raise _unknown(registry, base, kind)
    if not at:
        return [(loss, None) for loss in rows]
    having = [loss for loss in rows if any(d.upstream == upstream for d in loss.dialects)]
    if not having:
        raise _unknown_dialect(rows, upstream)
    return [(loss, loss.dialect(upstream)) for loss in having]


def _unknown(registry: Registry, name: str, kind: str | None) -> ConfigError:
    if where := PARTS.get(spelling(name)):
        return ConfigError(f"{name!r} is no loss of its own: it {where}")
    if kind is not None:
        return unknown_loss(registry.losses, name, kind)
    names = [loss.name for loss in registry.losses]
    return unknown("loss", name, names, more="composer-plugins list shows all")


def _unknown_dialect(rows: list[Loss], upstream: str) -> ConfigError:
    """Of two kinds that share the name, each with its own dialects."""
    name = rows[0].name
    known = [d.upstream for loss in rows for d in loss.dialects]
    if len(rows) == 1 or near(upstream, known):
        return unknown("dialect", upstream, known, stem=f"{name}@", more=f"{name!r} alone is the paper's")
    lists = [f"{loss.kind} {', '.join(f'{name}@{d.upstream}' for d in loss.dialects)}" for loss in rows]
    return ConfigError(f"unknown dialect '{name}@{upstream}'; known: {'; '.join(lists)}")


def print_page(console: Console, registry: Registry, loss: Loss, only: Dialect | None) -> Problem | None:
    """Everything the catalogue and the kernel's docstring say of a loss; what is wrong with its kernel."""
    dialects = [only] if only else list(loss.dialects)
    console.print(Text(f"{loss.name}  ({loss.kind})", style="bold"))
    console.print(Text(loss.summary))
    console.print()
    console.print(Padding(Text(inspect.getdoc(loss.kernel()) or ""), (0, 0, 0, 2)))
    console.print()
    origin = registry.origins[loss.kind, loss.name]
    facts = {
        "paper": loss.paper,
        "kernel": loss.path,
        "proof": loss.proof,
        "denominator": loss.mode,
        "batch": "a statistic of the whole batch: micro-batches change it" if loss.over_batch else "",
        "scores": "length-averaged log-probabilities" if loss.average else "",
        "runs in": _runs_in(registry, loss),
        "from": origin,
    }
    console.print(_grid([(label, text) for label, text in facts.items() if text]))
    console.print(_section("inputs", _inputs(loss, dialects)))
    if loss.parameters:
        console.print(_section("parameters", _parameters(loss, dialects)))
    for d in dialects:
        lines = [("source", d.source), ("proof", d.proof), *([("note", d.note)] if d.note else [])]
        console.print(_section(f"{loss.name}@{d.upstream}", _grid(lines)))
    from composer_plugins.example_tables import tables  # loads torch

    try:
        console.print(_section("on the worked example", tables(loss, dialects)))
    except Exception as error:  # a plugin's own kernel
        what = f"{loss.kind} {loss.name!r}: its kernel {loss.path} fails on the worked example"
        return Problem(origin, f"{what}: {in_a_line(error)}")
    return None


def _runs_in(registry: Registry, loss: Loss) -> str:
    if running := [a.framework for a in registry.adapters if a.runs(loss)]:
        return ", ".join(running)
    meant_to = any(loss.kind in a.provides for a in registry.adapters)
    return "no framework here yet: call the kernel" if meant_to else "a part: call the kernel"


def _section(title: str, body: Table | Group) -> Group:
    return Group(Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _grid(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for label, text in rows:
        grid.add_row(label, Text(text))
    return grid


def _inputs(loss: Loss, dialects: list[Dialect]) -> Table:
    shown = [(name, f"{INPUTS[name].shape}  {INPUTS[name].help}") for name in loss.needs]
    for name in loss.optional:
        takers = ", ".join(f"@{d.upstream}" for d in dialects if name in d.takes)
        optional = f"optional; {takers} takes it" if takers else "optional"
        shown.append((name, f"{INPUTS[name].shape}  {INPUTS[name].help} ({optional})"))
    return _grid(shown)


def _parameters(loss: Loss, dialects: list[Dialect]) -> Table:
    """A column to a dialect; what it leaves at the default is in parentheses."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True, style="dim")
    for heading in ("default", *(f"@{d.upstream}" for d in dialects)):
        table.add_column(heading)
    table.add_column("range")
    table.add_column("meaning")
    for name, parameter in loss.parameters.items():
        own = [_value(name, parameter, d) for d in dialects]
        choices = " | ".join(map(str, parameter.choices))
        table.add_row(name, str(parameter.default), *own, choices or parameter.interval, Text(parameter.help))
    return table


def _value(name: str, parameter: Parameter, dialect: Dialect) -> Text:
    values = {**dialect.params, **dialect.counts}
    return Text(str(values[name])) if name in values else Text(f"({parameter.default})", style="dim")
