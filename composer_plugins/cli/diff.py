"""`composer-plugins diff`: what differs between two losses or dialects of one kind, and no more."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, complain, foreign_code, installed, page, table
from composer_plugins.cli.example import at, example_of, label_of, positions_of, written
from composer_plugins.cli.recorded import Numbers, column, examples
from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice, find
from composer_plugins.losses.row import GRADIENTS, KINDS, REQUIRED

if TYPE_CHECKING:
    from composer_plugins.losses.registry import Problem, Registry

ABSENT = "not there"  # of a parameter that one of them does not have


def diff(
    first: Annotated[
        str, typer.Argument(help="A loss, a dialect or a function.", autocompletion=complete_loss)
    ],
    second: Annotated[str, typer.Argument(help="Another of the same kind.", autocompletion=complete_loss)],
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what differs between two losses or dialects: what they take, and what they give on the example.

    Compared are parameters, inputs, denominators and numbers. What a framework does around the loss is in
    the notes of `explain`. A kernel that fails on the example is reported, and the exit status is then 1.
    """
    registry = installed(first, second)
    with foreign_code():
        named = pairs(registry, first, second, kind)
        compared = [compare(registry, two) for two in named]
    if as_json:
        answer(json.dumps([data for data, _ in compared], indent=2))
    else:
        for i, (data, _) in enumerate(compared):
            typer.echo("\n" * min(i, 1), nl=False)
            _print(page(), data)
    if problems := [problem for _, faults in compared for problem in faults]:
        complain(problems)
        raise typer.Exit(1)


def pairs(registry: "Registry", first: str, second: str, kind: str | None) -> list[tuple[Choice, Choice]]:
    """The two losses, once for each kind that both names have; ConfigError if they share no kind."""
    ours, theirs = find(registry, first, kind, "FIRST"), find(registry, second, kind, "SECOND")
    found = [(a, b) for a in ours for b in theirs if a.loss.kind == b.loss.kind]
    if not found:
        kinds = [" and ".join(KINDS[one.loss.kind].singular for one in rows) for rows in (ours, theirs)]
        problem = f"{second!r} is {kinds[1]}, and {first!r} is {kinds[0]}"
        raise ConfigError("SECOND", problem, "name two of one kind")
    return found


def compare(registry: "Registry", choices: tuple[Choice, Choice]) -> tuple[dict[str, Any], list["Problem"]]:
    """What differs, for JSON, and the faults of the kernels."""
    from composer_plugins.cli.explaining import problem_of

    problems, numbers = list["Problem"](), []
    for one in choices:
        try:
            numbers.append(example_of(one.loss, [one.dialect]).results[column(one.dialect)])
        except (Exception, SystemExit) as error:  # a plugin's own kernel
            problems.append(problem_of(registry, one.loss, error))
    names = [choice.name for choice in choices]
    data = {
        "names": names,
        "kind": choices[0].loss.kind,
        "differences": differences(*choices),
        "examples": {  # values of parameters that have no default
            one.name: values
            for one in (choices if len(numbers) == 2 else ())
            if (values := {n: x for n, x in examples(one.loss).items() if n not in _given(one)})
        },
        "numbers": _differing(names, numbers) if len(numbers) == 2 else None,
    }
    return data, problems


def _given(choice: Choice) -> dict[str, Any]:
    """The parameters that a dialect sets, to a value or to a number of the batch."""
    return {**choice.params, **(choice.dialect.denominators if choice.dialect else {})}


def differences(ours: Choice, theirs: Choice) -> dict[str, dict[str, Any]]:
    """What differs besides the numbers: its value by loss, without a loss that has no such parameter."""
    first, second = _described(ours), _described(theirs)
    found: dict[str, dict[str, Any]] = {}
    for what in {**first, **second}:
        values = {x.name: of[what] for x, of in ((ours, first), (theirs, second)) if what in of}
        if what not in first or what not in second or first[what] != second[what]:
            found[what] = values
    return found


def _described(choice: Choice) -> dict[str, Any]:
    loss = choice.loss
    values = loss.defaults | _given(choice)
    return {
        "inputs": ", ".join(loss.needs),
        "optional inputs": ", ".join(loss.optional) or "none",
        "optional inputs passed": ", ".join(choice.optional) or "none",
        **{name: repr(value) if value is REQUIRED else value for name, value in values.items()},
        "denominator": choice.mode or "none of its own",
        "scores": "averages over tokens" if choice.average else "sums over tokens",
        "advantages": "one per sequence" if loss.per_sequence else "one per token or sequence",
        "statistic": "of the whole batch" if loss.over_batch else "of each row",
        "gradient": GRADIENTS[loss.gradient] or "the derivative of the value",
    }


def _differing(names: list[str], results: list[dict[str, Numbers]]) -> list[dict[str, Any]]:
    """The numbers on the worked example that differ in the four digits of the page."""
    ours, theirs = results
    found = []
    for kind in (name for name in ours if name in theirs):
        for position in positions_of(ours[kind]):
            two = [at(result[kind], position) for result in results]
            if written(two[0]) != written(two[1]):
                values = dict(zip(names, two, strict=True))
                found.append({"of": kind, "at": label_of(position), "values": values})
    return found


def _print(console: Console, data: dict[str, Any]) -> None:
    names, different, numbers = data["names"], data["differences"], data["numbers"]
    console.print(Text(f"{names[0]} and {names[1]}  ({data['kind']})", style="bold"))
    if different:
        cells = [(what, *(str(row.get(name, ABSENT)) for name in names)) for what, row in different.items()]
        console.print(table(cells, ("", *names), indent=2), "", sep="\n")
    for kind in dict.fromkeys(one["of"] for one in numbers or ()):
        found = [(one["at"], one["values"]) for one in numbers if one["of"] == kind]
        cells = [(where, *(written(values[name]) for name in names)) for where, values in found]
        console.print(table(cells, (kind, *names), right=names, indent=2), "", sep="\n")
    for name, values in data["examples"].items():
        given = ", ".join(f"{parameter}={value}" for parameter, value in values.items())
        console.print(f"The numbers of {name} are with {given}: it has no default, and this is an example.")
    if numbers is None:
        console.print("Their numbers could not be compared.")
    elif not numbers:
        console.print("Their numbers on the worked example are equal.")
    if not different and numbers == []:
        notes = f"`composer-plugins explain {names[0].partition('@')[0]}`"
        console.print(
            f"Nothing differs: they take the same. The notes of {notes} say what a framework does around it."
        )
    elif not different and numbers is None:
        console.print("What they take does not differ.")
