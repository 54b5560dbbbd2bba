"""A replay that is killed at random moments loses no answer that has arrived, and asks none twice."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.recipes.trace_replay.journal import Journal
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed
from parity_tests.rigs.scripted_faults import FaultyTeachers

LIMIT = 900  # seconds


def killed(folder: Path, kills: int, max_usd: float) -> dict[str, Any]:
    """What the harness has found, which checks the journal after each kill and fails at the first fault."""
    program = "parity_tests.rigs.replay_kills"
    command = [sys.executable, "-m", program, str(folder), str(kills), str(max_usd)]
    # A session of its own: the server and the replaying process end with it.
    harness = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, complaints = harness.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(harness.pid, signal.SIGKILL)
    assert harness.returncode == 0, complaints[-3000:]
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_every_answer_is_there_once_after_random_kills(tmp_path: Path, kills: int) -> None:
    found = killed(tmp_path, kills, 1000.0)
    assert found["kills"] == kills
    assert found["answered"] == found["billed"] == found["wanted"] > kills
    assert found["requests"] > found["answered"]  # some were in flight at a kill


def test_a_small_budget_holds_through_random_kills(tmp_path: Path) -> None:
    found = killed(tmp_path, 1000, 0.1)  # it ends when the budget is used up
    assert found["kills"] > 5 and 0 < found["answered"] < found["wanted"]
    assert found["billed_usd"] < found["spent_usd"] <= 0.1


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from composer_plugins.recipes.trace_replay.journal import Journal
from composer_plugins.recipes.trace_replay.replay import replay
from parity_tests.rigs.replayed import a_state, a_teacher
try:
    with Journal(sys.argv[1]) as journal:
        run = replay(
            [a_state(i) for i in range(500)], [a_teacher(sys.argv[2])], journal,
            samples=1, concurrency=4, max_usd=10.0,
        )
        asyncio.run(run)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_a_replay_and_keeps_what_has_arrived(tmp_path: Path) -> None:
    with FaultyTeachers(echo, delay=0.01) as server:
        command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "j"), server.base_url]
        running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            while len(server.billed) < 10 and running.poll() is None:
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            _, complaints = running.communicate(timeout=LIMIT)
        finally:
            running.kill()
        assert (running.returncode, complaints) == (130, "")
        with Journal(tmp_path / "j") as journal:
            answered = [*journal.answers()]
            assert len(server.billed) - 4 <= len(answered) < 500 and journal.interrupted <= 4
        states, before = [a_state(i) for i in range(500)], len(server.billed)
        done = replayed(tmp_path / "j", states[:50], [a_teacher(server.base_url)])
    assert done.answered_before + done.answered == 50
    assert len(server.billed) <= before + done.answered
