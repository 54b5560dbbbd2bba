"""A replay that is killed at random moments loses no answer that has arrived, and asks none twice."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs.paths import ROOT

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
