"""`composer-plugins explain`: one loss on a page, with its dialects and the numbers that they give."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, complain, foreign_code, installed, page, table
from composer_plugins.cli.example import at, example_of, given_to, label_of, positions_of, written
from composer_plugins.cli.listing import IMPORT_PATH, changes, row_as_data
from composer_plugins.cli.recorded import Example, docstring
from composer_plugins.errors import ConfigError, did_you_mean
from composer_plugins.frameworks.inputs import conditions
from composer_plugins.frameworks.registry import running
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import Problem, Registry
from composer_plugins.losses.row import GRADIENTS, Dialect, Loss

AVERAGES = {True: "length-averaged log-probabilities", False: "summed log-probabilities"}
WIDEST = 100  # prose is not easier to read in longer lines
# In a docstring: the end of a line whose sentence goes on in the next line.
LINE_END = re.compile(r"(?<!\n)\n(?!\n| |- |[A-Z]\w*: )")


def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="A loss (cispo), a dialect (cispo@trl), or a function (my_package.losses:my_loss, "
            "my_losses.py:my_loss).",
            autocompletion=complete_loss,
        ),
    ],
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: everything that the page shows.")] = False,
) -> None:
    """Show a loss: formula, paper, parameters, and its dialects with the numbers they give.

    A kernel that fails on the example is reported on stderr, and the exit status is then 1.
    """
    from composer_plugins.losses.choosing import find

    registry = installed(*words)
    if len(words) > 1:
        raise several_named(registry, *words[:2])
    with foreign_code():
        found = find(registry, words[0], kind)
    results = [results_of(registry, one) for one in found]
    problems = [one for one in results if isinstance(one, Problem)]
    if as_json:
        pages = [as_data(registry, *one) for one in zip(found, results, strict=True)]
        faults = [problem._asdict() for problem in (*registry.problems, *problems)]
        answer(json.dumps({"losses": pages, "problems": faults}, indent=2))
    else:
        console = page()
        for i, one in enumerate(found):
            if i:
                console.rule()
            print_page(console, registry, one, results[i])
    complain(problems)
    if problems:
        raise typer.Exit(1)


def several_named(registry: Registry, first: str, second: str) -> ConfigError:
    """The error for two names, of which the second may be the upstream of a dialect."""
    dialects = {f"{loss.name}@{one.upstream}" for loss in registry.losses for one in loss.dialects}
    meant, problem = f"{first}@{second}", f"{first!r} and {second!r} are given, and one page is of one loss"
    remedy = did_you_mean([meant]) if meant in dialects else "compare two with composer-plugins diff"
    return ConfigError("NAME", problem, remedy)


def results_of(registry: Registry, choice: Choice) -> Example | Problem:
    """What the loss and its dialects give on the worked example, or the fault of the kernel."""
    with foreign_code():
        try:
            return example_of(choice.loss, (None, *_dialects(choice)))
        except (Exception, SystemExit) as error:  # a plugin's own kernel
            return problem_of(registry, choice.loss, error)


def print_page(console: Console, registry: Registry, choice: Choice, results: Example | Problem) -> None:
    """Print all that the catalogue and the kernel's docstring say of a loss, and its numbers."""
    loss, dialects = choice.loss, _dialects(choice)

    def section(title: str, parts: Iterable[RenderableType]) -> None:
        console.print(Text(f"\n{title}", style="bold"))
        for part in parts:
            console.print(Padding(part, (0, 0, 0, 2), expand=False))

    console.print(Text(f"{loss.name}  ({loss.kind})", style="bold"))
    if loss.path != loss.name:  # the summary of an import path is its docstring's first line
        console.print(loss.summary)
    text = Text(LINE_END.sub(" ", docstring(loss)))
    console.print(Padding(text, (1, 0, 1, 2)), width=min(console.width, WIDEST), overflow="fold")
    console.print(table(_facts(registry, loss)))
    inputs = [(one["name"], one["shape"], one["help"]) for one in _inputs(loss, dialects)]
    section("inputs", [table(inputs)])
    if loss.parameters:
        meanings = [
            (name, str(loss.defaults[name]), " | ".join(map(str, one.choices)) or one.interval, one.help)
            for name, one in loss.parameters.items()
        ]
        section("parameters", [table(meanings, ("", "default", "values", ""))])
    for d in dialects:
        section(f"{loss.name}@{d.upstream}", [table(_facts_of_dialect(loss, d))])
    if not isinstance(results, Problem):
        section("on the worked example", _example(results))


def _example(example: Example) -> Iterator[RenderableType]:
    """A table to a quantity (the loss, its gradient), a row to a dialect; the inputs above the first."""
    above, beside = given_to(example)
    if values := ", ".join(f"{name}={value}" for name, value in example.parameters.items()):
        yield Text(f"with {values} (no default: an example)", style="dim")
    if above:
        yield table([(name, written(x)) for name, x in above.items()])
    for quantity, x in next(iter(example.results.values())).items():
        positions = positions_of(x)
        given = [*beside.items(), *((name, one[quantity]) for name, one in example.results.items())]
        rows = [(name, *(written(at(one, position)) for position in positions)) for name, one in given]
        headings = [label_of(position).replace(" token", "\ntoken") for position in positions]
        if not beside:
            yield " "
        yield table(rows, (quantity, *headings), right=headings)
        beside = {}


def as_data(registry: Registry, choice: Choice, results: Example | Problem) -> dict[str, Any]:
    """What the page shows, for JSON. Without an example where the kernel fails."""
    loss, dialects = choice.loss, _dialects(choice)
    return {
        **row_as_data(registry, loss, dialects),
        "docstring": docstring(loss),
        "runs_in": _runs_in(loss),
        "inputs_when": _when(loss),
        "inputs": _inputs(loss, dialects),
        "example": None if isinstance(results, Problem) else results._asdict(),
    }


def _dialects(choice: Choice) -> list[Dialect]:
    """The dialect that was named, or all."""
    return [choice.dialect] if choice.dialect else list(choice.loss.dialects)


def problem_of(registry: Registry, loss: Loss, error: BaseException) -> Problem:
    """The fault of a kernel that fails on the worked example, or that returns something wrong."""
    from composer_plugins.cli.worked_example import fault

    return Problem(registry.origins.get((loss.kind, loss.name), ""), fault(loss, error), loss.name)


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
        **{
            f"in {name}": "; ".join(f"{need}: {when}" for need, when in found.items())
            for name, found in _when(loss).items()
        },
        "from": registry.origins.get((loss.kind, loss.name), IMPORT_PATH),
    }
    return [(label, text) for label, text in rows.items() if text]


def _facts_of_dialect(loss: Loss, dialect: Dialect) -> list[tuple[str, str]]:
    rows = {
        "values": changes(dialect) or "the defaults",
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


def _when(loss: Loss) -> dict[str, dict[str, str]]:
    """By framework that runs it, when it has which input, where that is not always."""
    found = {one.name: conditions(one.name, loss) for one in running() if one.runs(loss)}
    return {name: when for name, when in found.items() if when}


def _inputs(loss: Loss, dialects: list[Dialect]) -> list[dict[str, Any]]:
    shown = []
    for name in (*loss.needs, *loss.optional):
        help_ = INPUTS[name].help
        if is_optional := name in loss.optional:
            taking = ", ".join(f"@{d.upstream}" for d in dialects if name in d.optional)
            help_ += f" (optional; taken by {taking})" if taking else " (optional)"
        shown.append({"name": name, "shape": INPUTS[name].shape, "help": help_, "optional": is_optional})
    return shown
