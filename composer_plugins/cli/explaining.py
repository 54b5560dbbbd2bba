"""`composer-plugins explain`: one loss on a page, its dialects side by side with the numbers they give."""

import inspect
from collections.abc import Sequence
from typing import cast

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_plugins.catalogue import Dialect, Kind, Loss, check_kind, unknown_loss
from composer_plugins.errors import ConfigError, in_a_line, near, spelling, unknown
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import Problem, Registry
from composer_plugins.rows import kind_of_import_path, row_of_import_path

GRADIENTS = {
    "derivative": "",
    "score": "of a detached weight times log pi(y_t), not the derivative of the value",
    "surrogate": "not the derivative of the value: see the docstring",
}

# Published names that are not rows, and how to compute what they mean.
PARTS = {
    "wpo": "weigh the pairs of any preference loss with wpo_weights and weighted of "
    "composer_plugins.kernels.preference",
    "ld_dpo": "score completions with ld_logprobs of composer_plugins.kernels.preference, then use dpo",
    "bnpo": "use grpo@trl with the denominator token-mean@trl, counted in each micro-batch",
}


def find(registry: Registry, name: str, kind: str | None = None) -> list[tuple[Loss, Dialect | None]]:
    """The losses of that name, one of each kind that has it; "cispo@trl" finds the dialect.

    The kind of a function named by import path ("my_package.losses:my_loss") follows from its first input.
    """
    if kind is not None:
        check_kind(kind, "--kind")
    if ":" in name:
        kind = kind or kind_of_import_path(name, registry.losses)
        return [(row_of_import_path(name, cast(Kind, kind), "NAME", registry.losses), None)]
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
        return ConfigError("NAME", f"{name!r} is not a loss of its own", where)
    if kind is not None or "." in name:
        return unknown_loss(registry.losses, name, kind or "policy", option="NAME")
    names = [loss.name for loss in registry.losses]
    return unknown("NAME", name, names, noun="loss", more="composer-plugins list shows all")


def _unknown_dialect(rows: list[Loss], upstream: str) -> ConfigError:
    """The error for an unknown dialect; two kinds may share the name, each with dialects of its own."""
    name = rows[0].name
    known = [d.upstream for loss in rows for d in loss.dialects]
    if len(rows) == 1 or near(upstream, known):
        more = f"{name!r} alone is the paper's"
        return unknown("NAME", upstream, known, noun="dialect", stem=f"{name}@", more=more)
    lists = [f"{loss.kind} {', '.join(f'{name}@{d.upstream}' for d in loss.dialects)}" for loss in rows]
    return ConfigError("NAME", f"unknown dialect '{name}@{upstream}'", f"known: {', or '.join(lists)}")


def print_page(console: Console, registry: Registry, loss: Loss, only: Dialect | None) -> Problem | None:
    """Print all that the catalogue and the kernel's docstring say of a loss; return a fault of the kernel."""
    dialects = [only] if only else list(loss.dialects)
    console.print(Text(f"{loss.name}  ({loss.kind})", style="bold"))
    if loss.path != loss.name:  # the summary of an import path is its docstring's first line
        console.print(Text(loss.summary))
    console.print()
    console.print(Padding(Text(inspect.getdoc(loss.kernel()) or ""), (0, 0, 0, 2)))
    console.print()
    origin = registry.origins.get((loss.kind, loss.name), "an import path")
    facts = {
        "paper": loss.paper,
        "kernel": loss.path,
        "proof": loss.proof,
        "denominator": loss.mode,
        "batch": "a statistic of the whole batch: micro-batches change it" if loss.over_batch else "",
        "advantages": "one per sequence: it averages those that differ by token" if loss.per_sequence else "",
        "gradient": GRADIENTS[loss.gradient],
        "scores": "length-averaged log-probabilities" if loss.average else "",
        "runs in": _runs_in(registry, loss),
        "from": origin,
    }
    console.print(_grid([(label, text) for label, text in facts.items() if text]))
    console.print(_section("inputs", _inputs(loss, dialects)))
    if loss.parameters:
        kept = " (in parentheses: the dialect keeps the default)" if dialects else ""
        console.print(_section(f"parameters{kept}", _parameters(loss, dialects)))
    for d in dialects:
        facts = {"source": d.source, "proof": d.proof, "denominator": d.mode, "note": d.note}
        lines = [(label, text) for label, text in facts.items() if text]
        console.print(_section(f"{loss.name}@{d.upstream}", _grid(lines)))
    from composer_plugins.cli.example_tables import tables  # loads torch

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
    return "no adapter yet: call the kernel" if meant_to else "a part of other losses: call the kernel"


def _section(title: str, body: Table | Group) -> Group:
    return Group(Text(""), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _grid(rows: Sequence[tuple[str, ...]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for texts in rows:
        grid.add_row(*map(Text, texts))
    for column in grid.columns:
        column.overflow = "fold"
    if grid.columns:
        grid.columns[0].no_wrap, grid.columns[0].style = True, "dim"
    return grid


def _inputs(loss: Loss, dialects: list[Dialect]) -> Table:
    shown: list[tuple[str, ...]] = [(name, *INPUTS[name]) for name in loss.needs]
    for name in loss.optional:
        dialects_with_it = ", ".join(f"@{d.upstream}" for d in dialects if name in d.optional)
        optional = f"optional; taken by {dialects_with_it}" if dialects_with_it else "optional"
        shown.append((name, INPUTS[name].shape, f"{INPUTS[name].help} ({optional})"))
    return _grid(shown)


def _parameters(loss: Loss, dialects: list[Dialect]) -> Group:
    """The range and meaning of each parameter, and its value in each dialect."""
    meanings: list[tuple[str, ...]] = []
    values = Table(box=None, pad_edge=False)
    values.add_column("", no_wrap=True, style="dim")
    for heading in ("default", *(f"@{d.upstream}" for d in dialects)):
        values.add_column(heading, overflow="fold")
    for name, parameter in loss.parameters.items():
        choices = " | ".join(map(str, parameter.choices))
        meanings.append((name, choices or parameter.interval, parameter.help))
        default = str(loss.defaults[name])
        values.add_row(name, default, *(_value(name, default, d) for d in dialects))
    return Group(_grid(meanings), Text(""), values)


def _value(name: str, default: str, dialect: Dialect) -> Text:
    values = {**dialect.params, **dialect.denominators}
    return Text(str(values[name])) if name in values else Text(f"({default})", style="dim")
