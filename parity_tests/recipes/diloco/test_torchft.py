"""torchft's DiLoCo around a Trainer: real processes and a lighthouse, compared with one process."""

import signal
import time
from pathlib import Path

from composer_plugins.recipes.diloco.on_this_machine import lighthouse_on_this_machine as lighthouse
from parity_tests.recipes.diloco.tiny import SYNC_EVERY, read_lines, reference
from parity_tests.recipes.diloco.tiny_trainer import MICRO_BATCHES, run_trainer
from parity_tests.rigs.forked import SECONDS, ended, processes

ROUNDS = 3
MAX_STEPS = SYNC_EVERY * ROUNDS


def reported(log: Path, replica: int) -> list[tuple[int, int, str]]:
    """Number, replicas and hash of each round that the replica reported, in this order."""
    lines = [line for line in read_lines(log) if line["replica"] == replica]
    return [(line["number"], line["replicas"], line["weights"]) for line in lines if "number" in line]


def error(log: Path) -> str:
    (line,) = read_lines(log)
    return str(line["error"])


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
        ends = time.monotonic() + SECONDS
        while len(reported(log, 0)) < 4 and time.monotonic() < ends:
            time.sleep(0.02)
        second = start(address, 1, *common, begins=again)
        assert [ended(survivor), ended(second)] == [0, 0]
    of_survivor, of_first, of_second = reported(log, 0), reported(log, 1)[:2], reported(log, 1)[2:]
    assert of_first == of_survivor[:2]
    assert [number for number, _, _ in of_survivor] == list(range(1, rounds + 1))
    counts = [count for _, count, _ in of_survivor]
    alone = counts.count(1)
    assert counts == [2] * 2 + [1] * alone + [2] * (rounds - 2 - alone) and 2 <= alone < rounds - 3
    # In the first round that the second process reports it takes part with nothing.
    assert of_second == of_survivor[2 + alone :]
    trained = [(0, 0, number) for number in range(rounds)] + [(1, 0, 0), (1, 0, 1)]
    trained += [(1, 1, number) for number in range(3 + alone, rounds)]
    expected = reference([range(count) for count in counts], trained, MICRO_BATCHES)
    assert [weights for _, _, weights in of_survivor] == expected


def test_three_replicas_train_from_the_weights_of_one_of_them(tmp_path: Path) -> None:
    log, replicas = tmp_path / "log", 3
    with lighthouse() as address, processes(run_trainer) as start:
        common = (replicas, MAX_STEPS, str(log))
        running = [start(address, i, *common, weights_seed=i, start_after=i) for i in range(replicas)]
        assert [ended(process) for process in running] == [0] * replicas
    hashes = [[weights for _, _, weights in reported(log, replica)] for replica in range(replicas)]
    assert hashes[0] == hashes[1] == hashes[2] and len(set(hashes[0])) == ROUNDS


def test_too_few_replicas_are_an_error_after_the_timeout(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with lighthouse() as address, processes(run_trainer) as start:
        assert ended(start(address, 0, 2, MAX_STEPS, str(log), timeout=3.0)) == 0
    assert error(log).startswith("replicas: 1 of 2 came in 3 seconds; start the others")


def test_no_lighthouse_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with processes(run_trainer) as start:
        address = "http://127.0.0.1:1"  # nothing listens there
        assert ended(start(address, 0, 2, 6, str(log), timeout=3.0)) == 0
    assert error(log).startswith("lighthouse: http://127.0.0.1:1 does not answer")


def test_an_exception_in_the_training_ends_the_process(tmp_path: Path) -> None:
    """The threads of torchft's manager do not keep it alive."""
    log = tmp_path / "log"
    with lighthouse() as address, processes(run_trainer) as start:
        assert ended(start(address, 0, 1, MAX_STEPS, str(log), raises=True)) == 1
