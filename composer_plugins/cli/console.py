"""What the commands share: the installed losses, the faults of plugins on stderr, a page on stdout."""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.errors import ConfigError, in_a_line

if TYPE_CHECKING:
    from composer_plugins.losses.registry import Problem, Registry


def installed(*names: str, kernels: bool = True) -> "Registry":
    """Everything installed; the faults of plugins are printed to stderr.

    The kernels of plugins load torch. They are not imported without `kernels`, and where no loss has one of
    the `names`.
    """
    from composer_plugins.losses.registry import collect, get_plugin_manager

    with foreign_code():
        manager = get_plugin_manager()
        registry = collect(manager, kernels=False)
        known = {loss.name for loss in registry.losses}
        if kernels and all(":" in name or name.partition("@")[0] in known for name in names):
            registry = collect(manager)
    complain(registry.problems)
    return registry


def complain(problems: "Iterable[Problem]") -> None:
    """Print problems to stderr, one to a line."""
    for problem in problems:
        Console(stderr=True).print(Text(f"error: {problem}", style="red"), soft_wrap=True)


@contextmanager
def foreign_code() -> Iterator[None]:
    """Send to stderr what plugins, losses and frameworks print: stdout is for the command's own result.

    File descriptor 1 is redirected, too, because subprocesses and C code write there.
    Raises ConfigError where such code ends the program.
    """
    _flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        problem = f"the code of a loss, a plugin or a framework ended the program: {in_a_line(error)}"
        raise ConfigError("exit", problem, "let it raise another exception") from error
    finally:
        _flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _flush() -> None:
    """Write what Python and C still hold for file descriptor 1."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    with suppress(OSError, TypeError, AttributeError):  # a system without one library for all of C
        ctypes.CDLL(None).fflush(None)


def answer(text: str, *, nl: bool = True) -> None:
    """Write a result to stdout. Where its reader has gone (`| head -1`), the rest is dropped.

    The exit status is then the same as with a reader.
    """
    try:
        typer.echo(text, nl=nl)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def page() -> Iterator[Console]:
    """A console for tables, as wide as the terminal, or 200 columns where there is none.

    Trailing blanks, which fill the last column of a table, are removed.
    """
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=wide)
    console.width = console.width  # as it is before stdout is redirected
    with console.capture() as capture, foreign_code():
        yield console
    answer("\n".join(line.rstrip(" ") for line in capture.get().split("\n")), nl=False)
