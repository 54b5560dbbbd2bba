"""`composer-plugins list`: the catalogue as tables, or as JSON."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_plugins.cli.filters import Shown
from composer_plugins.cli.layout import BLANK, Column, records, show
from composer_plugins.frameworks.registry import running
from composer_plugins.losses.registry import OURS, Problem, Registry
from composer_plugins.losses.row import KINDS, REQUIRED, Dialect, Loss, Parameter

HEADINGS = ("name", "what it is", "source", "proof")
# The fields of a loss and of a dialect that JSON has as they are.
OF_A_LOSS: tuple[str, ...] = (
    *("name", "kind", "summary", "paper", "proof", "needs", "optional", "mode", "average", "gradient"),
    *("over_batch", "per_sequence"),
)
OF_A_DIALECT = ("params", "mode", "average", "denominators", "optional", "source", "proof", "note")
IMPORT_PATH = "an import path"  # where a loss is from that no distribution has registered


def wrong_results(registry: Registry) -> list[Problem]:
    """A problem for each loss of a plugin that returns something wrong. The tests check our own losses."""
    found = []
    for loss in registry.losses:
        if (origin := registry.origins[loss.kind, loss.name]) != OURS:
            from composer_plugins.cli.worked_example import wrong_result  # loads torch, as the plugin does

            if message := wrong_result(loss):
                found.append(Problem(origin, message, ""))
    return found


def as_data(registry: Registry, rows: Iterable[Shown]) -> dict[str, Any]:
    """The rows as JSON can hold them."""
    return {
        "losses": [row_as_data(registry, loss, dialects) for loss, dialects in rows],
        "problems": [problem._asdict() for problem in registry.problems],
    }


def row_as_data(registry: Registry, loss: Loss, dialects: list[Dialect]) -> dict[str, Any]:
    """A row and some of its dialects as JSON can hold them."""
    return {
        **{name: getattr(loss, name) for name in OF_A_LOSS},
        "kernel": loss.path,
        "distribution": registry.origins.get((loss.kind, loss.name), IMPORT_PATH),
        "frameworks": [one.name for one in running() if one.runs(loss)],
        "parameters": {n: _parameter(p, loss.defaults[n]) for n, p in loss.parameters.items()},
        "dialects": [
            {"name": f"{loss.name}@{d.upstream}"} | {name: getattr(d, name) for name in OF_A_DIALECT}
            for d in dialects
        ],
    }


def print_tables(console: Console, registry: Registry, rows: list[Shown]) -> None:
    """A table to each kind: each loss with its source and its proof, its dialects below it."""
    for kind, names in KINDS.items():
        cells = [cell for row in rows if row[0].kind == kind for cell in _cells(registry, *row)]
        if cells:
            console.print(Text(names.plural, style="bold"))
            headings = zip(HEADINGS, zip(*cells, strict=True), strict=True)
            columns = [Column(heading, texts, is_text=heading != "name") for heading, texts in headings]
            show(console, [*records(columns, console.width), BLANK])
    console.print(Text(count(rows)))


def _cells(registry: Registry, loss: Loss, dialects: list[Dialect]) -> Iterator[list[Text]]:
    origin = registry.origins[loss.kind, loss.name]
    what = loss.summary if origin == OURS else f"{loss.summary} [plugin: {origin}]"
    yield [Text(loss.name, style="cyan"), *map(Text, (what, loss.paper, loss.proof))]
    for d in dialects:
        texts = (f"  @{d.upstream}", _changes(d) or "as the paper", d.source, d.proof)
        yield [Text(text, style="dim") for text in texts]


def count(rows: list[Shown]) -> str:
    """How many of each kind, in a sentence."""
    numbers = {kind: sum(loss.kind == kind for loss, _ in rows) for kind in KINDS}
    parts = [_number(n, KINDS[kind].singular, KINDS[kind].plural) for kind, n in numbers.items() if n]
    dialects = _number(sum(len(dialects) for _, dialects in rows), "a dialect", "dialects")
    return ", ".join([*parts, dialects]) if parts else "no loss matches"


def _number(n: int, one: str, many: str) -> str:
    return f"1 {one.partition(' ')[2]}" if n == 1 else f"{n} {many}"


def _changes(dialect: Dialect) -> str:
    values = [f"{name}={value}" for name, value in {**dialect.params, **dialect.denominators}.items()]
    return ", ".join([*values, *(f"with {name}" for name in dialect.optional)])


def _parameter(parameter: Parameter, default: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"help": parameter.help}
    if default is REQUIRED:
        shown["required"] = True
    else:
        shown["default"] = default
    if parameter.choices:
        return {**shown, "choices": list(parameter.choices)}
    if parameter.low != -math.inf:
        shown |= {"low": 0, "low_open": True} if parameter.low_open else {"low": parameter.low}
    return shown if parameter.high == math.inf else {**shown, "high": parameter.high}
