"""Replicas over an object store that are killed and started again: every round is the reference's."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from parity_tests.recipes.diloco.tiny import commits_of, read_lines, reference, run_replica, wait_until
from parity_tests.rigs.forked import SECONDS, ended, processes

REPLICAS = 3
MOMENTS = [
    ("before", "deltas/"),
    ("in the middle of the file", "deltas/"),
    ("before the link", "deltas/"),
    ("after the link", "deltas/"),
    ("after", "deltas/"),
    ("before", "commits/"),
    ("after the link", "commits/"),
    ("before the link", "states/"),
    ("after", "states/"),
    ("before", "replicas/"),
]


def assert_equals_the_reference(url: str, log: Path, rounds: int) -> list[tuple[int, ...]]:
    commits = commits_of(url)
    assert [commit.round for commit in commits] == list(range(rounds))
    participants = [commit.participants for commit in commits]
    assert [commit.weights for commit in commits] == reference(participants, read_lines(log))
    return participants


@pytest.mark.parametrize(("moment", "prefix"), MOMENTS)
def test_a_replica_is_killed_and_starts_again(moment: str, prefix: str, tmp_path: Path) -> None:
    """Replica 0 kills itself in its first round that it gets to the moment."""
    url, log, rounds = str(tmp_path / "store"), tmp_path / "log", 4
    with processes(run_replica) as start:
        options = {"log": str(log)}
        others = [start(url, replica, REPLICAS, rounds, **options) for replica in (1, 2)]
        first = start(url, 0, REPLICAS, rounds, dies=(moment, prefix), **options)
        # Whether replica 0 ever creates a commit is decided by a race, and then it is not killed.
        died = ended(first) == -signal.SIGKILL
        if died:
            others.append(start(url, 0, REPLICAS, rounds, attempt=1, **options))
        assert died or prefix == "commits/"
        assert [ended(process) for process in others] == [0] * len(others)
    assert assert_equals_the_reference(url, log, rounds) == [(0, 1, 2)] * rounds
    assert not list((tmp_path / "store" / "temporary").iterdir())


@pytest.mark.parametrize("timeout", [60.0, 0.3])
def test_kills_at_random_moments(timeout: float, tmp_path: Path) -> None:
    """With the long timeout a round waits for whoever was killed, with the short one it does not."""
    url, log, rounds, kills = str(tmp_path / "store"), tmp_path / "log", 30, 25
    draw, attempts = random.Random(int(timeout)), [0] * REPLICAS
    with processes(run_replica) as start:

        def begin(replica: int) -> Any:
            options = {"log": str(log), "timeout": timeout, "pause": 0.01, "attempt": attempts[replica]}
            return start(url, replica, REPLICAS, rounds, **options)

        running = [begin(replica) for replica in range(REPLICAS)]
        wait_until(log.exists)
        ends, killed = time.monotonic() + SECONDS, 0
        while any(process.is_alive() for process in running) and time.monotonic() < ends:
            time.sleep(draw.uniform(0.0, 0.3))
            replica = draw.randrange(REPLICAS)
            if killed < kills and running[replica].is_alive():
                running[replica].kill()
                killed += 1
                if ended(running[replica]) == 0:
                    continue
                attempts[replica] += 1
                running[replica] = begin(replica)
        assert [ended(process) for process in running] == [0] * REPLICAS
    participants = assert_equals_the_reference(url, log, rounds)
    assert sum(attempts) > 5, "too few replicas were killed for this to show anything"
    assert timeout < 1 or participants == [(0, 1, 2)] * rounds
