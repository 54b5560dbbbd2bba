"""A replay that is killed at random moments loses no answer that has arrived, and asks none twice.

`kill_at_random` checks the journal after each kill, and fails at the first fault.
"""

from pathlib import Path

import pytest

from parity_tests.rigs.replay_kills import kill_at_random


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_every_answer_is_there_once_after_random_kills(tmp_path: Path, kills: int) -> None:
    found = kill_at_random(tmp_path / "j", kills)
    assert found["kills"] == kills
    assert found["answered"] == found["billed"] == found["wanted"] > kills
    assert found["requests"] > found["answered"]  # some were in flight at a kill
