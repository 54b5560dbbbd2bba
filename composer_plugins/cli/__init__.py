"""The command line. Torch and the frameworks are imported only by the commands that need them."""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins import __version__
from composer_plugins.cli.check import check
from composer_plugins.cli.completion import (
    KindOption,
    complete_framework,
    complete_input,
    complete_kind,
    complete_loss,
    complete_upstream,
    join_at_signs,
)
from composer_plugins.cli.conform import conform
from composer_plugins.cli.console import answer, complain, foreign_code, installed, page
from composer_plugins.cli.demo import demo
from composer_plugins.cli.diff import diff
from composer_plugins.cli.doctor import doctor
from composer_plugins.cli.given import WithWords
from composer_plugins.cli.migrate import migrate
from composer_plugins.cli.new_plugin import new_plugin
from composer_plugins.cli.plot import plot
from composer_plugins.cli.teacher import teacher
from composer_plugins.errors import ComposerError

if TYPE_CHECKING:
    from composer_plugins.losses.registry import Problem

app = typer.Typer(
    name="composer-plugins",
    help="RL losses, written once as a loss per token, for TRL, verl and PRIME-RL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the tables of rich cut what is wider than a column
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits it
)


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and status 2."""
    sys.path.insert(0, os.getcwd())  # import paths are then found as by `python -m composer_plugins`
    join_at_signs(os.environ)
    try:
        app()
    except ComposerError as error:
        Console(stderr=True).print(
            Text(f"error: {error}".replace("\n", "\nerror: "), style="red"), soft_wrap=True
        )
        sys.exit(2)


def print_version(wanted: bool) -> None:
    """Answer `--version` before anything else is looked at."""
    if wanted:
        typer.echo(f"composer-plugins {__version__}")
        raise typer.Exit


@app.callback()
def options_before_the_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


def list_losses(
    search: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only losses with these words in the name, paper or summary, or in what frameworks call "
            "them: gspo, 2402.03300, vanilla, epsilon_high ..."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these kinds: policy, advantage, divergence ...", autocompletion=complete_kind
        ),
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(
            help="Only losses with all these inputs: ref_logprobs ...", autocompletion=complete_input
        ),
    ] = None,
    framework: Annotated[
        list[str] | None,
        typer.Option(
            help="Only losses that the adapters of all these frameworks can run: trl ...",
            autocompletion=complete_framework,
        ),
    ] = None,
    dialects_of: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the dialects of these upstreams: trl, verl, verl<0.7.1 ...",
            autocompletion=complete_upstream,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every parameter.")] = False,
) -> None:
    """List every loss and dialect, with its source and the test that proves it.

    Each option may be repeated. With --json the kernels of plugins are called once, on six tokens, to see
    what they return; `check` and `explain` call them too.

    A fault of an installed plugin is printed to stderr, and the exit status is then 1.
    """
    from composer_plugins.cli import filters, listing

    registry = installed(kernels=as_json)
    with foreign_code():
        wrong = listing.wrong_results(registry) if as_json else []
    if wrong:
        complain(wrong)
        registry = registry._replace(problems=(*registry.problems, *wrong))
    chosen = filters.filters(
        registry, search or (), kind or (), needs or (), framework or (), dialects_of or ()
    )
    rows = filters.select(registry, chosen)
    if not rows:
        for line in filters.why_none(registry, chosen):
            typer.echo(line, err=as_json)
    if as_json:
        answer(json.dumps(listing.as_data(registry, rows), indent=2))
    elif rows:
        with page() as console:
            listing.print_tables(console, registry, rows)
    if registry.problems:
        raise typer.Exit(1)


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A loss (cispo), a dialect (cispo@trl), or an import path (my_package.losses:my_loss).",
            autocompletion=complete_loss,
        ),
    ],
    kind: KindOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: everything that the page shows.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw the loss, as `plot` does: a PNG or SVG file, by its suffix."),
    ] = None,
) -> None:
    """Show a loss: formula, paper, parameters, and its dialects with the numbers they give.

    A kernel that fails on the example is reported on stderr, and the exit status is then 1.
    """
    from composer_plugins.cli import explaining
    from composer_plugins.losses.choosing import find

    registry = installed(name)
    problems = list["Problem | None"]()
    with foreign_code():
        found = find(registry, name, kind)
    if plot is not None:
        from composer_plugins import plotting

        with foreign_code():
            plotting.save(name, plot, kind=kind, key="--plot")
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        with foreign_code():
            pages = [explaining.as_data(registry, one) for one in found]
        problems = [problem for _, problem in pages]
        faults = [problem._asdict() for problem in (*registry.problems, *problems) if problem]
        answer(json.dumps({"losses": [data for data, _ in pages], "problems": faults}, indent=2))
    else:
        with page() as console:
            for i, one in enumerate(found):
                if i:
                    console.rule()
                problems.append(explaining.print_page(console, registry, one))
    if failed := [problem for problem in problems if problem]:
        complain(failed)
        raise typer.Exit(1)


for command in (list_losses, explain, diff, check, conform, doctor, migrate, teacher, new_plugin, plot, demo):
    # Without a short help, `--help` shows the first line of the docstring cut to the width of the terminal.
    summary, _, _ = (inspect.getdoc(command) or "").partition("\n")
    name = "list" if command is list_losses else None
    app.command(name, cls=WithWords if command in (doctor, migrate) else None, short_help=summary)(command)
