"""`composer-plugins conform`: do our losses equal the losses of the frameworks installed here?"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli.completion import complete_loss
from composer_plugins.cli.console import answer, foreign_code, page, table
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.frameworks.registry import OURS

if TYPE_CHECKING:
    from composer_plugins.conformance.running import Row, Suite

STYLES = {"differs": "red", "could not be run": "red", "not in the catalogue": "yellow", "equal": "green"}
NOTHING_RAN = 2


def conform(
    frameworks: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Only these: {', '.join(one.name for one in OURS if one.claims)}. "
            "By default each that is here.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="A checkout of PRIME-RL, NeMo-RL or slime, which are on no package index."),
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(help="Only this loss (grpo, cispo@trl); may be repeated.", autocompletion=complete_loss),
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Random cases for each loss.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
) -> None:
    """Compare our losses with the losses of frameworks installed here, or of a checkout: value and gradient.

    Run it after an upgrade. The exit status is 0 if all are equal within rounding, 1 if one is not or could
    not be run, and 2 if nothing could be run.
    """
    if as_json and as_markdown:
        raise ConfigError("--markdown", "it was given with --json", "choose one of them")
    from composer_plugins.conformance import running, suites, tables
    from composer_plugins.losses.registry import losses

    known = suites.compared()
    for name in frameworks or ():
        if name not in known:
            raise unknown("conform", name, known, noun="framework")
    if source is not None and not source.is_dir():
        raise ConfigError("--source", f"the folder {str(source)!r} does not exist", "correct it")
    chosen = [one for name, one in known.items() if not frameworks or name in frameworks]
    if source is not None and all(one.package for one in chosen):
        named = " and ".join(one.title for one in known.values() if not one.package)
        raise ConfigError("--source", f"it is for {named}, which are not compared here", "remove it")
    by_checkout = [one.name for one in chosen if not one.package]
    if source is not None and len(by_checkout) > 1:
        problem = f"it may be a checkout for {', '.join(by_checkout)}"
        remedy = f"name one: composer-plugins conform {by_checkout[0]} --source DIR"
        raise ConfigError("--source", problem, remedy)
    names = {one.name for one in losses()}
    for base in [name.partition("@")[0] for name in loss or ()]:
        if base not in names:
            raise unknown("--loss", base, names, noun="loss", more="composer-plugins list shows all")
    results: list[tuple[str, Suite, list[Row]]] = []
    stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)
    unusable = False
    for framework in chosen:
        try:
            with foreign_code():
                suite = suites.suite_of(framework, source)
        except ConfigError as error:
            unusable = True
            stderr.print(Text(f"error: {error}", style="red"), soft_wrap=True)
            continue
        if suite is None:
            title = framework.title
            missing = f"{title} is not installed" if framework.package else f"no checkout of {title} is given"
            stderr.print(Text(f"{missing}: {framework.install}"), soft_wrap=True)
            continue
        with foreign_code(), stderr.status(f"comparing with {framework.title} {suite.version}"):
            rows = list(running.run(suite, cases=cases, only=loss or ()))
        results.append((framework.title, suite, rows))
    _check_compared(loss or (), results)
    if as_json:
        answer(json.dumps([tables.as_data(*result) for result in results], indent=2))
    elif as_markdown:
        answer("\n\n".join(tables.markdown(*result) for result in results))
    else:
        for result in results:
            print_table(*result)
    if not any(row.cases for _, _, rows in results for row in rows):
        raise typer.Exit(NOTHING_RAN)
    if unusable or any(row.status in running.BROKEN for _, _, rows in results for row in rows):
        raise typer.Exit(1)


def _check_compared(names: Sequence[str], results: "list[tuple[str, Suite, list[Row]]]") -> None:
    """Raise ConfigError for a loss that is compared in no framework that could be run."""
    from composer_plugins.conformance.running import fits

    claims = [claim for _, suite, _ in results for claim in suite.claims]
    for name in names:
        if results and not any(fits(claim, [name]) for claim in claims):
            titles = " or ".join(f"{title} {suite.version}" for title, suite, _ in results)
            base = name.partition("@")[0]
            every = {claim.ours for claim in claims if fits(claim, [base])}
            known = ", ".join(sorted(every or {claim.ours.partition("@")[0] for claim in claims}))
            problem = f"no loss of {titles} is compared with {name!r}"
            raise ConfigError("--loss", problem, f"there are comparisons of {known or 'no loss'}")


def print_table(title: str, suite: "Suite", rows: "list[Row]") -> None:
    """Print one framework's results."""
    from composer_plugins.conformance import tables
    from composer_plugins.conformance.running import cells

    console = page()
    console.print(Text(tables.title(title, suite), style="bold"))
    shown = ([Text(cell, style=STYLES.get(cell, "")) for cell in cells(row)] for row in rows)
    console.print(table(shown, tables.HEADINGS, right=tables.NUMBERS))
    console.print(Text(tables.count(rows)))
    console.print(Text(tables.EXPLAINED, style="dim"))
