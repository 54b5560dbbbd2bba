"""`composer-plugins explain`: one loss on a page, its dialects side by side with the numbers they give."""

import inspect
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from composer_plugins.cli.layout import BLANK, Column, entries, prose, show, tables
from composer_plugins.cli.listing import IMPORT_PATH, row_as_data
from composer_plugins.frameworks.registry import running
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import Problem, Registry
from composer_plugins.losses.row import GRADIENTS, Dialect, Loss

AVERAGES = {True: "length-averaged log-probabilities", False: "summed log-probabilities"}
INDENT = 2


def print_page(console: Console, registry: Registry, choice: Choice) -> Problem | None:
    """Print all that the catalogue and the kernel's docstring say of a loss; return a fault of the kernel."""
    loss, dialects, width = choice.loss, _dialects(choice), console.width - INDENT

    def section(title: str, parts: Iterable[RenderableType]) -> None:
        show(console, [BLANK, Text(title, style="bold")])
        show(console, parts, INDENT)

    console.print(Text(f"{loss.name}  ({loss.kind})", style="bold"))
    if loss.path != loss.name:  # the summary of an import path is its docstring's first line
        console.print(Text(loss.summary))
    show(console, [BLANK, *prose(_docstring(loss), width), BLANK], INDENT)
    show(console, entries(_facts(registry, loss), console.width))
    inputs = [(one["name"], one["shape"], one["help"]) for one in _inputs(loss, dialects)]
    section("inputs", entries(inputs, width))
    if loss.parameters:
        meanings = [
            (name, " | ".join(map(str, one.choices)) or one.interval, one.help)
            for name, one in loss.parameters.items()
        ]
        section("parameters", entries(meanings, width))
        kept = [Text("(in parentheses: the dialect keeps the default)")] if dialects else []
        section("values", [*kept, *_values(loss, dialects, width)])
    for d in dialects:
        section(f"{loss.name}@{d.upstream}", entries(_facts_of_dialect(loss, d), width))
    from composer_plugins.cli import example_tables  # loads torch

    try:
        results = example_tables.results_of(loss, dialects)
        section("on the worked example", example_tables.lines(loss, results, width))
    except (Exception, SystemExit) as error:  # a plugin's own kernel
        return problem_of(registry, loss, error)
    return None


def as_data(registry: Registry, choice: Choice) -> tuple[dict[str, Any], Problem | None]:
    """What the page shows, for JSON, and a fault of the kernel. Without an example where it fails."""
    from composer_plugins.cli import example_tables

    loss, dialects, problem, example = choice.loss, _dialects(choice), None, None
    try:
        example = example_tables.as_data(loss, example_tables.results_of(loss, dialects))
    except (Exception, SystemExit) as error:
        problem = problem_of(registry, loss, error)
    row = row_as_data(registry, loss, dialects)
    more = {
        "docstring": _docstring(loss),
        "runs_in": _runs_in(loss),
        "inputs": _inputs(loss, dialects),
    }
    return {**row, **more, "example": example}, problem


def _dialects(choice: Choice) -> list[Dialect]:
    """The dialect that was named, or all."""
    return [choice.dialect] if choice.dialect else list(choice.loss.dialects)


def problem_of(registry: Registry, loss: Loss, error: BaseException) -> Problem:
    """The fault of a kernel that fails on the worked example, or that returns something wrong."""
    from composer_plugins.cli.worked_example import fault

    return Problem(registry.origins.get((loss.kind, loss.name), ""), fault(loss, error), loss.name)


def _docstring(loss: Loss) -> str:
    return inspect.getdoc(loss.kernel()) or ""


def _facts(registry: Registry, loss: Loss) -> list[tuple[str, str]]:
    rows = {
        "paper": loss.paper,
        "kernel": loss.path,
        "proof": loss.proof,
        "denominator": loss.mode,
        "batch": "a statistic of the whole batch: micro-batches change it" if loss.over_batch else "",
        "advantages": "one per sequence: it averages those that differ by token" if loss.per_sequence else "",
        "gradient": GRADIENTS[loss.gradient],
        "scores": AVERAGES[True] if loss.average else "",
        "runs in": _runs_in(loss),
        "from": registry.origins.get((loss.kind, loss.name), IMPORT_PATH),
    }
    return [(label, text) for label, text in rows.items() if text]


def _facts_of_dialect(loss: Loss, dialect: Dialect) -> list[tuple[str, str]]:
    rows = {
        "source": dialect.source,
        "proof": dialect.proof,
        "denominator": dialect.mode,
        "scores": "" if dialect.average in (None, loss.average) else AVERAGES[dialect.average],
        "note": dialect.note,
    }
    return [(label, text) for label, text in rows.items() if text]


def _runs_in(loss: Loss) -> str:
    if names := [one.name for one in running() if one.runs(loss)]:
        return ", ".join(names)
    meant_to = any(loss.kind in one.provides for one in running())
    return "no adapter yet: call the kernel" if meant_to else "a part of other losses: call the kernel"


def _inputs(loss: Loss, dialects: list[Dialect]) -> list[dict[str, Any]]:
    shown = []
    for name in (*loss.needs, *loss.optional):
        help_ = INPUTS[name].help
        if is_optional := name in loss.optional:
            taking = ", ".join(f"@{d.upstream}" for d in dialects if name in d.optional)
            help_ += f" (optional; taken by {taking})" if taking else " (optional)"
        shown.append({"name": name, "shape": INPUTS[name].shape, "help": help_, "optional": is_optional})
    return shown


def _values(loss: Loss, dialects: list[Dialect], width: int) -> list[RenderableType]:
    """The value of each parameter by default and in each dialect."""
    defaults = {name: str(loss.defaults[name]) for name in loss.parameters}
    columns = [Column("default", [*defaults.values()])]
    for d in dialects:
        values = {**d.params, **d.denominators}
        cells = [str(values[name]) if name in values else f"({old})" for name, old in defaults.items()]
        columns.append(Column(f"@{d.upstream}", cells))
    return tables(Column("", [*defaults], "dim"), [columns], width)
