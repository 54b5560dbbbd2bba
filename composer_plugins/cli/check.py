"""`composer-plugins check`: every law that a loss of the catalogue obeys, on any loss."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, foreign_code, page, progress
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import OURS

if TYPE_CHECKING:
    from composer_plugins.testing.report import Report

CALLED = ", ".join([*(one.name for one in OURS if one.convention), "torch"])
STYLES = {"failed": "red", "unsafe": "yellow", "untraceable": "yellow"}
STYLES |= {"not applicable": "dim", "passed": "green"}


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Losses (grpo), dialects (cispo@trl), or functions (my_package.losses:my_loss, "
            "my_losses.py:my_loss).",
            autocompletion=complete_loss,
        ),
    ] = None,
    kind: KindOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only the law of this name; may be repeated."),
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(
            "--as",
            help=f"Call the function as this framework does, unchanged: {CALLED}. A name is then one of the "
            "framework's own losses.",
        ),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="With --as verl or prime-rl: the framework's version, 0.7.1.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value: a parameter of the function, or an option that it reads in the framework's "
            "config. May be repeated."
        ),
    ] = None,
    laws: Annotated[bool, typer.Option("--laws", help="Print the laws and exit.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for every law that does not hold.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the laws that hold, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check that a loss masks, overflows, cuts, packs and differentiates as every loss must.

    The exit status is 1 if the numbers of a loss are wrong or it cannot be used (failed), and 2 if it could
    not be loaded. It is 0 if all laws hold, and if a loss is unsafe or untraceable only, without --strict.
    """
    if laws:
        _print_laws(as_json)
        return
    if not names:
        remedy = "composer-plugins check NAME, or my_package.losses:my_loss"
        raise ConfigError("check", "no loss is named", remedy)
    try:
        with progress("loading") as tell, foreign_code():
            own = {"version": version, "options": options_of(option or [])}
            reports = list(_reports(names, convention, kind, only or [], own, tell))
    except ConfigError as error:
        raise (error.under("--", "") if error.key in ("kind", "only") else error) from None
    if as_json:
        answer(json.dumps([report.as_data() for report in reports], indent=2))
    else:
        console = page()
        for text, style in (line for report in reports for line in report.lines(verbose)):
            console.print(Text(text, style=STYLES.get(style, style)), soft_wrap=True)
    if not all(report.passed if strict else report.sound for report in reports):
        raise typer.Exit(1)


def _reports(
    names: list[str],
    convention: str | None,
    kind: str | None,
    only: list[str],
    own: dict[str, Any],
    tell: Callable[[str], None],
) -> "Iterator[Report]":
    """The report of each loss; `tell` is called with each law that is run."""
    if kind is not None and convention is not None:
        raise ConfigError("--kind", "it has no meaning with --as", "remove it: --as is for policy losses")
    if own["version"] is not None and convention is None:
        raise ConfigError("--version", "it has no meaning without --as", "add --as verl or --as prime-rl")
    if convention is not None:
        from composer_plugins.testing.conventions import check_as

        for name in names:
            yield check_as(name, convention, only, **own, tell=tell)
    else:
        from composer_plugins.losses.choosing import row_named

        # A name is looked up before torch is loaded.
        named = names if own["options"] else [row_named(name, kind) for name in names]
        tell(f"{' '.join(names)}: loading torch")
        from composer_plugins.testing.checking import check_row, find_row, laws_of

        rows = [find_row(one, kind, own["options"]) for one in named]
        for row in rows:
            laws_of(row, only)  # an error before the first law is run
        for row in rows:
            yield check_row(row, only, tell)


def options_of(given: list[str]) -> dict[str, Any]:
    """The values of name=value as YAML reads them, by their names."""
    from composer_plugins.objective.files import of_yaml, parsed

    found = dict[str, Any]()
    for one in given:
        name, equals, text = one.partition("=")
        if not name or not equals:
            raise ConfigError("--option", f"{one!r} sets nothing", "write --option name=value")
        found[name] = parsed(text, f"--option {name}", of_yaml)
    return found


def _print_laws(as_json: bool) -> None:
    from composer_plugins.frameworks.registry import conventions
    from composer_plugins.testing.all_laws import sections

    if as_json:
        data = [{"option": one.option, **law._asdict()} for one in sections() for law in one.laws]
        answer(json.dumps(data, indent=2))
        return
    console = page()
    for section in sections():
        console.print(Text(section.text, style="underline"), soft_wrap=True)
        for law in section.laws:
            where = f"({', '.join(law.kinds)})" if not section.option else ""
            if section.option and len(law.frameworks) < len(conventions()):
                where = "".join(f" --as {one}" for one in law.frameworks).strip()
            where += f" {law.finding}" if law.finding != "failed" else ""
            console.print(Text(law.name, style="bold"), Text(where.strip(), style="dim"), soft_wrap=True)
            console.print(Text(f"  {law.summary}"), soft_wrap=True)
        for name, reason in section.not_run:
            console.print(Text(name, style="bold"), Text("(not run)", style="dim"), soft_wrap=True)
            console.print(Text(f"  {reason[0].upper()}{reason[1:]}."), soft_wrap=True)
        console.print()
