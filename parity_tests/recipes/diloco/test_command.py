"""The command: its errors, and when it fails. What it trains is tested in test_trl.py."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco import __main__ as command
from composer_plugins.recipes.diloco.launching import Replica, run_replicas

OPTIONS = Replica(0, 2, 20, 10, 0, 60.0, store="x")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--store x --lighthouse y", "--lighthouse: --store is set too; set one of them"),
        ("--replica 0", "--replica: neither --lighthouse nor --store is set"),
    ],
)
def test_a_wrong_option_is_an_error(line: str, said: str) -> None:
    result = CliRunner().invoke(command.app, line.split())
    assert isinstance(result.exception, ConfigError) and str(result.exception).startswith(said)


def test_an_error_is_one_line_without_a_traceback() -> None:
    """In a process, as a user starts it. Nothing heavy is imported before the options are checked."""
    arguments = [sys.executable, "-m", "composer_plugins.recipes.diloco", "--steps", "25"]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (2, "")
    said = "--steps: 25 is not a multiple of --sync-every 10; set one, so that the last round is a whole one"
    assert run.stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    ("rounds", "statuses", "said"),
    [
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")], [0, 0], ""),
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "c")], [0, 0], "were not equal after every round"),
        ([(0, 1, "a"), (1, 1, "a"), (0, 2, "b")], [0, 0], "were not equal after every round"),
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")], [0, -9], "replica 1 ended with an error"),
    ],
)
def test_the_demo_fails_unless_all_weights_were_equal_after_every_round(
    rounds: list[tuple[int, int, str]],
    statuses: list[int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A round has the replica, its number, and the hash of the weights after it."""

    def run(options: Replica, report: Callable[[dict[str, Any]], None]) -> list[int]:
        for replica, number, weights in rounds:
            report({"replica": replica, "round": number, "weights": weights})
        return statuses

    monkeypatch.setattr(command, "run_replicas", run)
    assert command.run_demo(OPTIONS) == (not said)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("FAILED" in printed) == bool(said) and said in printed


def test_the_lines_and_the_exit_statuses_of_the_replicas_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import sys; print('{\"replica\": %s}\\n' % sys.argv[1], end=''); sys.exit(int(sys.argv[1]))"
    assert {"--replica=0", "--store=x"} < set(OPTIONS.command())
    monkeypatch.setattr(
        Replica, "command", lambda options: [sys.executable, "-c", program, str(options.replica)]
    )
    lines: list[dict[str, Any]] = []
    assert run_replicas(OPTIONS, lines.append) == [0, 1]
    assert sorted(line["replica"] for line in lines) == [0, 1]
