"""The command: its errors, and when it fails. What it trains is tested in test_trl.py."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes import shared
from composer_plugins.recipes.diloco import __main__ as command
from composer_plugins.recipes.diloco.launching import Platform, Replica
from composer_plugins.recipes.diloco.on_this_machine import ThisMachine

OPTIONS = Replica(0, 2, 20, 10, 0, 60.0, store="x")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--store x --lighthouse y", "--lighthouse: --store is set too; set one of them"),
        ("--replica 0", "--replica: neither --lighthouse nor --store is set"),
        ("--replica 0 --on modal", "--on: --replica trains in this process; remove one of them"),
        (
            "--flavor T4",
            "--on: an option of containers is set, and replicas on this machine are in none; set it",
        ),
        (
            "--on modal",
            "--store: '' is not the URL of a store that all containers reach; set one, such as s3://",
        ),
        (
            "--on hf-jobs --store FOLDER",
            "--store: 'FOLDER' is not the URL of a store that all containers reach",
        ),
        (
            "--on modal --store memory://x",
            "--install: the image python:3.12 does not have this package; set it",
        ),
        (
            "--on modal --store memory://x --install y",
            "--on modal: it needs modal, which is not installed here;",
        ),
    ],
)
def test_a_wrong_option_is_an_error(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
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
        ([(0, 1, "a"), (1, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")], [0, 0], ""),
        (
            [(0, 1, "a"), (1, 1, "c"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")],
            [0, 0],
            "were not equal after every",
        ),
        ([(0, 1, "a"), (1, 1, "a"), (0, 2, "b")], [0, 0], "NOT KNOWN whether the weights"),
        ([], [0, 0], "NOT KNOWN whether the weights"),
        ([(0, 1, "a"), (1, 1, "b"), (0, 2, "b")], [0, 0], "were not equal after every round"),
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")], [0, -9], "replica 1 ended with an error END"),
        ([], [None, 3], "replica 1 ended with an error, and all others that ran were stopped"),
    ],
)
def test_the_demo_fails_unless_all_weights_were_equal_after_every_round(
    rounds: list[tuple[int, int, str]],
    statuses: list[int | None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A round has the replica, its number, and the hash of the weights after it.

    A replica that is started again reports its rounds a second time.
    """

    def run(
        options: Replica, platform: Platform, report: Callable[[dict[str, Any]], None]
    ) -> list[int | None]:
        for replica, number, weights in rounds:
            report({"replica": replica, "round": number, "weights": weights})
        return statuses

    monkeypatch.setattr(command, "run_replicas", run)
    assert command.run_demo(OPTIONS, ThisMachine()) == (not said)
    printed = " ".join([*capsys.readouterr().out.split(), "END"])
    assert ("megabytes" in printed) == ("replica 1 ended" not in said)
    assert ("FAILED" in printed) == (bool(said) and "NOT KNOWN" not in said) and said in printed
