"""torchft's DiLoCo around a Trainer: real processes and a lighthouse, compared with one process."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torchft.coordination import LighthouseServer

from parity_tests.recipes.diloco.tiny import SYNC_EVERY, read_lines, reference, wait_until
from parity_tests.recipes.diloco.tiny_trainer import MICRO_BATCHES, run_trainer
from parity_tests.rigs.forked import ended, processes

ROUNDS = 5
MAX_STEPS = SYNC_EVERY * ROUNDS


@contextmanager
def lighthouse(min_replicas: int = 1) -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=60_000, heartbeat_timeout_ms=2_000
    )
    try:
        yield "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]
    finally:
        server.shutdown()


def expected(rounds: list[list[tuple[int, int]]]) -> list[str]:
    """The hashes after each round, in one process without torchft. A round has (replica, attempt)s."""
    trained = [(*who, number) for number, participants in enumerate(rounds) for who in participants]
    return reference([[replica for replica, _ in one] for one in rounds], trained, MICRO_BATCHES)


def reported(log: Path, replica: int) -> list[tuple[int, tuple[str, ...], str]]:
    """Number, participants and hash of each round that the replica reported, in this order."""
    lines = [line for line in read_lines(log) if line["replica"] == replica]
    return [(line["number"], tuple(line["participants"]), line["weights"]) for line in lines]


def errors(log: Path) -> dict[int, str]:
    return {line["replica"]: line["error"] for line in read_lines(log) if "error" in line}


def train_two(
    log: Path, own: Any = ({}, {}), replicas: int = 2, min_replicas: int = 1, **options: Any
) -> None:
    """Train replicas 0 and 1 to their end, each with its own options too."""
    with lighthouse(min_replicas) as address, processes(run_trainer) as start:
        given = (address, 0, replicas, MAX_STEPS, str(log)), (address, 1, replicas, MAX_STEPS, str(log))
        both = [start(*given[i], **options, **own[i]) for i in (0, 1)]
        assert [ended(process) for process in both] == [0, 0]


def test_a_killed_replica_leaves_the_other_training_and_may_come_back(tmp_path: Path) -> None:
    """Every round equals the training in one process. sync_every counts steps, not micro-batches.

    Replica 1 is killed in round 3. Started again it takes the weights of a later round, and trains on.
    """
    log, rounds = tmp_path / "log", 12
    with lighthouse() as address, processes(run_trainer) as start:
        common = (2, SYNC_EVERY * rounds, str(log))
        again = str(tmp_path / "replica 1 begins again")
        waits = (5 * SYNC_EVERY, again)  # otherwise the survivor may have ended before
        survivor = start(address, 0, *common, waits=waits, pause=0.2)
        first = start(address, 1, *common, dies_at=2 * SYNC_EVERY + 1)
        assert ended(first) == -signal.SIGKILL
        before = len(reported(log, 1))
        wait_until(lambda: len(reported(log, 0)) >= 4)
        second = start(address, 1, *common, begins=again)
        assert [ended(survivor), ended(second)] == [0, 0]
    of_survivor, of_first, of_second = reported(log, 0), reported(log, 1)[:2], reported(log, 1)[2:]
    assert before == 2 and of_first == of_survivor[:2]
    assert [number for number, _, _ in of_survivor] == list(range(1, rounds + 1))
    participants = [who for _, who, _ in of_survivor]
    alone = participants.count(("0",))
    assert participants == [("0", "1")] * 2 + [("0",)] * alone + [("0", "1")] * (rounds - 2 - alone)
    # The first round that the second process reports is the last that the survivor trained alone.
    assert of_second == of_survivor[1 + alone :] and 2 <= alone < rounds - 2
    trained = [[(0, 0), (1, 0)]] * 2 + [[(0, 0)]] * alone + [[(0, 0), (1, 1)]] * (rounds - 2 - alone)
    assert [weights for _, _, weights in of_survivor] == expected(trained)


def test_unequal_initial_weights_end_both(tmp_path: Path) -> None:
    log = tmp_path / "log"
    train_two(log, [{"weights_seed": replica} for replica in (0, 1)])
    said = "weights: weights of replica . differs from that of replica .; start every replica with the same "
    assert set(errors(log)) == {0, 1} and not [line for line in read_lines(log) if "number" in line]
    assert all(re.match(said, error) for error in errors(log).values())


@pytest.mark.slow
def test_a_wrong_number_of_replicas_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    """The lighthouse asks for 3 and 2 come; then the replicas ask for 3 and 2 come."""
    for min_replicas, replicas in ((3, 2), (1, 3)):
        log = tmp_path / f"log-{min_replicas}"
        train_two(log, replicas=replicas, min_replicas=min_replicas, timeout=5.0)
        assert set(errors(log)) == {0, 1}, errors(log)
        assert all("within 5 seconds" in one and "--min_replicas" in one for one in errors(log).values())


def test_no_lighthouse_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes(run_trainer) as start:
        address = "http://127.0.0.1:1"  # nothing listens there
        assert ended(start(address, 0, 2, 6, str(log), timeout=3.0)) == 0
    assert errors(log)[0].startswith("lighthouse: http://127.0.0.1:1 does not answer")


def test_an_exception_in_the_training_ends_the_process(tmp_path: Path) -> None:
    """The threads of torchft's manager do not keep it alive."""
    log = tmp_path / "log"
    with lighthouse() as address, processes(run_trainer) as start:
        assert ended(start(address, 0, 1, MAX_STEPS, str(log), raises=True)) == 1
