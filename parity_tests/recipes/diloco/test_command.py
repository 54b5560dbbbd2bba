"""The command: its errors, and when it fails. What it trains is tested in test_trl.py."""

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco import __main__ as command


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--store x --lighthouse y", "--lighthouse: --store is set too; set one of them"),
        ("--lighthouse y", "--lighthouse: --replica is not set"),
        ("--replica 0", "--replica: neither --lighthouse nor --store is set"),
        ("--replica 2 --store x", "--replica: it is 2; number the 2 replicas from 0"),
        ("--host here", "--host: it is for a replica with --lighthouse"),
        ("--timeout nan", "--timeout: it is nan; set seconds above 0"),
        ("--timeout -1", "--timeout: it is -1; set seconds above 0"),
        ("--store full", "--store: full has a run already; name a new one"),
    ],
)
def test_a_wrong_option_is_an_error(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/run.json").write_text("{}")
    result = CliRunner().invoke(command.app, line.split())
    assert isinstance(result.exception, ConfigError) and str(result.exception).startswith(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_replicas_end_with_the_demo(number: int, tmp_path: Path) -> None:
    program = (
        "import time\nfrom composer_plugins.recipes.diloco.launching import Replica, started\n"
        f"options = Replica(0, 2, 100_000_000, 10, 0, 600.0, store={str(tmp_path)!r})\n"
        "with started(options) as run:\n    print('started', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None and demo.stdout.readline() == "started\n"
            replicas = psutil.Process(demo.pid).children()
        finally:
            demo.send_signal(number)
    try:
        assert len(replicas) == 3 and not psutil.wait_procs(replicas, 60)[1]  # one cleans up after the others
    finally:
        for replica in replicas:
            with suppress(psutil.NoSuchProcess):
                replica.kill()


def test_an_error_is_one_line_without_a_traceback() -> None:
    """In a process, as a user starts it. Nothing heavy is imported before the options are checked."""
    arguments = [sys.executable, "-m", "composer_plugins.recipes.diloco", "--steps", "25"]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (2, "")
    said = "--steps: 25 is not a multiple of --sync-every 10; set one, so that the last round is a whole one"
    assert run.stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "b")], ""),
        ([(0, 1, "a"), (1, 1, "a"), (1, 2, "b"), (0, 2, "c")], "differ after round 2"),
        ([(0, 1, "a"), (1, 1, "a"), (0, 2, "b")], "1 of 2 rounds were reported by all"),
    ],
)
def test_the_demo_fails_unless_all_weights_were_equal_after_every_round(
    events: list[tuple[int, int, str]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An event has the replica, the number of the round, and the hash of the weights after it."""
    common = {"participants": ["0", "1"], "reward": 0.5}
    rounds = [{"replica": i, "number": number, "weights": one * 64, **common} for i, number, one in events]
    result = {"rewards": [0.1, 0.5], "greedy": 0.4, "bytes_of_weights": 1_000_000}

    @contextmanager
    def started(options: command.Replica) -> Iterator[Any]:
        yield iter([*rounds, {"replica": 0, **result}, {"replica": 1, **result}])

    monkeypatch.setattr(command, "started", started)
    assert command.run_demo(command.Replica(0, 2, 20, 10, 0, 60.0, store="x")) == (not said)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("FAILED" in printed) == bool(said) and said in printed


def test_a_replica_that_fails_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    """The other one is killed, and what the failed one wrote to stderr is shown."""
    failing = command.Replica(0, 2, 20, 10, 0, 60.0, store="ftp://x")
    with pytest.raises(SystemExit) as caught, command.started(failing) as events:
        list(events)
    assert caught.value.code == 2
    assert "error: store: it is not known how an object of ftp://x is" in capfd.readouterr().err
    assert not multiprocessing.active_children()
