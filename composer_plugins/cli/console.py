"""What the commands share: the installed losses, the faults of plugins on stderr, tables on stdout."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_plugins.errors import ConfigError, in_a_line

if TYPE_CHECKING:
    from composer_plugins.losses.registry import Problem, Registry

answer = typer.echo  # a result on stdout


def installed(*names: str, kernels: bool = True) -> "Registry":
    """Everything installed, with the recorded defaults; the faults of plugins are printed to stderr.

    The kernels of plugins load torch. They are not imported without `kernels`, and where no loss has one of
    the `names`.
    """
    from composer_plugins.cli.recorded import use_recorded_defaults
    from composer_plugins.losses.registry import collect, get_plugin_manager

    with foreign_code():
        manager = get_plugin_manager()
        registry = collect(manager, kernels=False)
        known = {loss.name for loss in registry.losses}
        if kernels and all(":" in name or name.partition("@")[0] in known for name in names):
            registry = collect(manager)
    use_recorded_defaults(registry.losses)
    complain(registry.problems)
    return registry


def complain(problems: "Iterable[Problem]") -> None:
    """Print problems to stderr, one to a line."""
    for problem in problems:
        Console(stderr=True).print(Text(f"error: {problem}", style="red"), soft_wrap=True)


@contextmanager
def foreign_code() -> Iterator[None]:
    """Send to stderr what plugins, losses and frameworks print in Python; ConfigError where they exit.

    What a subprocess or C code writes to file descriptor 1 still goes to stdout.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        problem = f"the code of a loss, a plugin or a framework ended the program: {in_a_line(error)}"
        raise ConfigError("exit", problem, "let it raise another exception") from error


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr, if it is a terminal, what is being done; yield a function that shows something else."""
    with Console(stderr=True).status(Text(text)) as shown:
        yield lambda next_text: shown.update(Text(next_text))


def page() -> Console:
    """A console on stdout, as wide as the terminal, or 200 columns without a terminal."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def table(
    rows: Iterable[Sequence[str | Text]],
    headings: Sequence[str] = (),
    *,
    right: Sequence[str] = (),
    indent: int = 0,
) -> Padding:
    """A table without lines, in which a text that is too long goes on below itself.

    The columns with the headings `right` hold numbers.
    """
    rows = list(rows)
    made = Table(box=None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings or [""] * len(rows[0]):
        made.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        made.add_row(*row)
    return Padding(made, (0, 0, 0, indent), expand=False)
