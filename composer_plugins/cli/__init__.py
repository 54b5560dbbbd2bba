"""The command line. Torch and the frameworks are imported only by the commands that need them."""

import atexit
import gc
import inspect
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import composer_plugins
from composer_plugins import __version__
from composer_plugins.errors import ComposerError

# Each command by its name: a module of this package, and a function there.
COMMANDS = {
    "list": ("listing", "list_losses"),
    "explain": ("explaining", "explain"),
    "diff": ("diff", "diff"),
    "check": ("check", "check"),
    "conform": ("conform", "conform"),
    "doctor": ("doctor", "doctor"),
    "migrate": ("migrate", "migrate"),
    "teacher": ("teacher", "teacher"),
    "health": ("health", "health"),
    "new-plugin": ("new_plugin", "new_plugin"),
    "plot": ("plot", "plot"),
    "compare": ("compare", "compare"),
    "demo": ("demo", "demo"),
}
WITH_WORDS = ("doctor", "migrate")  # they take a framework's own command line after --
BRIEF = ("list", "explain", "diff")  # they end before memory matters


def main() -> None:
    """Run the command line; one of our errors is one line on stderr and status 2."""
    sys.path.insert(0, os.getcwd())  # import paths are then found as by `python -m composer_plugins`
    name = next((word for word in sys.argv[1:2] if word in COMMANDS), None)
    if name in BRIEF:  # a quarter of their time went into collecting what the imports make
        gc.disable()
        atexit.register(gc.freeze)  # and Python would collect it all at the end
    try:
        program(*([name] if name else ()))()
    except ComposerError as error:
        Console(stderr=True).print(
            Text(f"error: {error}".replace("\n", "\nerror: "), style="red"), soft_wrap=True
        )
        sys.exit(2)


def program(*names: str) -> typer.Typer:
    """Return the command line with these commands, or with all; the modules of others are not imported."""
    app = typer.Typer(
        name="composer-plugins",
        help=" ".join((composer_plugins.__doc__ or "").partition("\n\n")[0].split()),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # the tables of rich cut what is wider than a column
        context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits it
    )
    app.callback()(options_before_the_command)
    for name in names or COMMANDS:
        module, function = COMMANDS[name]
        command = getattr(import_module(f"composer_plugins.cli.{module}"), function)
        # Without a short help, `--help` shows the docstring's first line cut to the width of the terminal.
        summary, _, _ = (inspect.getdoc(command) or "").partition("\n")
        own: dict[str, Any] = {"short_help": summary}
        if name in WITH_WORDS:
            own["cls"] = import_module("composer_plugins.cli.given").WithWords
        app.command(name, **own)(command)
    return app


def __getattr__(name: str) -> Any:
    """Make `app`, with all commands, when it is asked for."""
    if name == "app":
        return program()
    raise AttributeError(name)


def print_version(wanted: bool) -> None:
    """Answer `--version` before anything else is looked at."""
    if wanted:
        typer.echo(f"composer-plugins {__version__}")
        raise typer.Exit


def options_before_the_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""
