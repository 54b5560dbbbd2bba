"""The command line in this process: its output, and its errors."""

from typing import Any

from typer.testing import CliRunner

from composer_plugins.cli import app
from composer_plugins.errors import ConfigError


def invoke(*words: str, columns: int = 200) -> Any:
    """The result of `composer-plugins` with these words, in a terminal of this width."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, words)


def output(*words: str, columns: int = 200) -> str:
    """What a command prints that succeeds."""
    done = invoke(*words, columns=columns)
    assert done.exit_code == 0, done.exception or done.output
    return str(done.stdout)


def error(*words: str) -> str:
    """What a command says that cannot be run. `main` prints it and exits with status 2."""
    raised = invoke(*words).exception
    assert isinstance(raised, ConfigError), raised
    return str(raised)
