"""What several recipes need. Importing this module loads no framework."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from composer_plugins.errors import ComposerError, ConfigError, writing

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}  # the context_settings of a command line
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended: 128 + SIGINT


def run_command(app: Callable[[], object]) -> None:
    """Run a command line. An error of ours is one line on stderr and status 2."""
    try:
        app()
    except ComposerError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)


def check_installed(key: str, packages: Iterable[str], extras: str) -> None:
    """Raise ConfigError if one of these modules is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        problem = f"it needs {', '.join(missing)}, which is not installed here"
        raise ConfigError(key, problem, f"run pip install 'composer-plugins[{extras}]'")


def cut(text: str, most: int) -> str:
    """The first `most` characters of a text; an ellipsis says that there are more."""
    return text if len(text) <= most else f"{text[:most]}..."


def make_folder(key: str, folder: Path) -> None:
    """Create a folder; raise ConfigError unless files can be written to it."""
    with writing(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under another name and rename it, so that it appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path.name, path):
            if path.is_dir():
                raise OSError("it is a folder")
            write(partial)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()
