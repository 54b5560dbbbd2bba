"""Rounds over an object store: the weights of all replicas are equal, or it is an error."""

import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.diloco.launching import Replica, run_replicas
from composer_plugins.recipes.diloco.outer import OuterOptimizer
from parity_tests.recipes.diloco.tiny import (
    Learner,
    make_rounds,
    read_lines,
    reference,
    run_replica,
    weights_of,
)
from parity_tests.rigs.forked import ended, processes

REPLICAS, ROUNDS = 3, 6


def assert_equals_the_reference(log: Path) -> None:
    """All replicas have ended, each round had the same weights on all, and these are the reference's."""
    lines = read_lines(log)
    expected = reference([range(REPLICAS)] * ROUNDS, [line[1:] for line in lines if line[0] == "trains"])
    for line in lines:
        if line[0] == "weights":
            assert line[2] == expected[line[1]]
    finals = {line[1]: line[2] for line in lines if line[0] == "ended"}
    assert finals == dict.fromkeys(range(REPLICAS), expected[-1])


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_replicas_of_two_speeds_equal_the_reference(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path / "store") if kind == "folder" else f"memory:/{tmp_path}"
    log = tmp_path / "log"
    with ThreadPoolExecutor(REPLICAS) as pool:
        runs = [
            pool.submit(run_replica, url, number, REPLICAS, ROUNDS, str(log), pause=pause)
            for number, pause in enumerate((0.05, 0.0, 0.0))
        ]
        assert [run.result() for run in runs] == [None] * REPLICAS
    assert_equals_the_reference(log)


@pytest.mark.parametrize("kind", [".safetensors", ".json", ".result.json"])
@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_a_replica_killed_while_it_writes_starts_again(moment: str, kind: str, tmp_path: Path) -> None:
    """After the object and before the marker it trains the round again; after the marker it does not."""
    url, log = str(tmp_path / "store"), tmp_path / "log"
    with processes(run_replica) as start:
        others = [start(url, replica, REPLICAS, ROUNDS, str(log)) for replica in (1, 2)]
        assert ended(start(url, 0, REPLICAS, ROUNDS, str(log), dies=(moment, kind))) == -signal.SIGKILL
        others.append(start(url, 0, REPLICAS, ROUNDS, str(log), attempt=1))
        assert [ended(process) for process in others] == [0] * REPLICAS
    assert_equals_the_reference(log)
    was_marked = kind == ".result.json" or (moment, kind) == ("after", ".json")
    assert (["trains", 0, 1, 1] in read_lines(log)) != was_marked


class Forked:
    """A platform of tiny replicas in processes. Replica 1 dies in its first attempts, in round 2."""

    def __init__(self, start: Any, log: Path, deaths: int) -> None:
        self.start_process, self.log, self.deaths, self.attempts = start, str(log), deaths, Counter[int]()

    def start(self, options: Replica) -> Any:
        replica, attempt = options.replica, self.attempts[options.replica]
        self.attempts[replica] += 1
        dies = ("after", ".safetensors") if replica == 1 and attempt < self.deaths else None
        arguments = (options.store, replica, REPLICAS, ROUNDS, self.log)
        process = self.start_process(*arguments, attempt=attempt, dies=dies)
        return SimpleNamespace(lines=list, wait=lambda: ended(process), stop=process.kill)


OPTIONS = Replica(0, REPLICAS, ROUNDS, 1, 0, 60.0)


@pytest.mark.parametrize("deaths", [1, 2])
def test_the_launcher_goes_on_with_what_was_finished(deaths: int, tmp_path: Path) -> None:
    """It starts a replica again once. If that fails too, the next launch needs no round again."""
    log, options = tmp_path / "log", replace(OPTIONS, store=str(tmp_path / "store"))
    with processes(run_replica) as start:
        platform, lines = Forked(start, log, deaths), list[dict[str, Any]]()
        statuses = run_replicas(options, platform, lines.append)
        assert [line["exit_status"] for line in lines] == [-signal.SIGKILL] * deaths
        assert platform.attempts == {0: 1, 1: 2, 2: 1}
        if deaths == 1:
            assert statuses == [0] * REPLICAS
        else:
            assert statuses == [None, -signal.SIGKILL, None]
            assert len(list((tmp_path / "store/round-000001").iterdir())) == 3 * REPLICAS
            assert run_replicas(options, platform, lines.append) == [0] * REPLICAS
    assert_equals_the_reference(log)
    trained = [line[1] for line in read_lines(log) if line[0] == "trains" and line[3] == 0]
    assert sorted(trained) == [*range(REPLICAS)]  # the first round, once


def test_what_is_not_marked_as_a_whole_does_not_exist_for_a_reader(tmp_path: Path) -> None:
    writer, reader = (make_rounds(tmp_path, number, 2, timeout=0.0) for number in (1, 0))
    local = Learner().train(writer.weights, 1)
    said = "replicas: round 1 has no marker of replica 0 after 0 seconds; start the missing ones again"
    with pytest.raises(DataError, match=said):
        writer.synchronise(local)
    marker = tmp_path / "round-000001/replica-1.json"
    assert reader.read(1) is not None
    text = marker.read_text()
    for half_of_it in ("", text[: len(text) // 2]):
        marker.write_text(half_of_it)
        assert reader.read(1) is None
    marker.unlink()
    assert reader.read(1) is None


LOST = "the store has lost data, or two processes have one number; begin a new run in a new store"


def train_one_round(url: Path, replicas: int = 2) -> None:
    log = str(url.with_suffix(".log"))
    with ThreadPoolExecutor(replicas) as pool:
        runs = [pool.submit(run_replica, str(url), number, replicas, 1, log) for number in range(replicas)]
    assert [run.result() for run in runs] == [None] * replicas


@pytest.mark.parametrize(
    ("end", "data", "said"),
    [
        (".safetensors", b"cut off", "replica-0.safetensors is not what its marker says"),
        (".safetensors", save(weights_of(5)), "replica-0.safetensors is not what its marker says"),
        (".safetensors", None, "replica-0.safetensors is not what its marker says"),
        (".json", None, "the own marker of round 1 is gone; replica 0 used it"),
        (".json", b'{"sha', "the own marker of round 1 is gone; replica 0 used it"),
    ],
)
def test_what_the_store_has_lost_is_not_trained_again(
    end: str, data: bytes | None, said: str, tmp_path: Path
) -> None:
    """After the last round, when nobody would meet the other weights in a next one."""
    train_one_round(tmp_path / "store")
    damaged = tmp_path / f"store/round-000001/replica-0{end}"
    damaged.unlink() if data is None else damaged.write_bytes(data)
    before = {file: file.read_bytes() for file in tmp_path.glob("store/*/*")}
    with pytest.raises(DataError, match=f"{said}: {LOST}"):
        run_replica(str(tmp_path / "store"), 0, 2, 1, str(tmp_path / "log"), attempt=1)
    assert {file: file.read_bytes() for file in tmp_path.glob("store/*/*")} == before


def test_a_second_process_with_the_same_number_is_an_error(tmp_path: Path) -> None:
    """Also where it has looked for the marker before the first one has written it."""
    first, late, later = (make_rounds(tmp_path) for _ in range(3))
    first.synchronise(Learner().train(first.weights, 0))
    with pytest.raises(DataError, match="replica: another process has trained round 1 as replica 0"):
        late.synchronise(Learner().train(late.weights, 1))
    later.is_marked = lambda: False  # type: ignore[method-assign]
    with pytest.raises(DataError, match=f"replica-0.result.json was made with weights .*{LOST}"):
        later.synchronise(Learner().train(later.weights, 2))


def test_other_weights_in_a_later_round_have_another_cause(tmp_path: Path) -> None:
    """Not other settings, which are compared before."""
    train_one_round(tmp_path / "store")
    result = tmp_path / "store/round-000001/replica-1.result.json"
    exchange = make_rounds(tmp_path / "store", 0, 2)
    exchange.take_step()
    for name in (result, tmp_path / "store/round-000002/replica-1.json"):
        name.parent.mkdir(exist_ok=True)
        name.write_text(result.read_text().replace(exchange.start["weights"], "other"))
    for check in (exchange.finish, exchange.take_step):
        with pytest.raises(DataError, match=f"weights other and not .*, and the settings are equal: {LOST}"):
            check()


def test_the_end_waits_for_the_results_of_all_replicas(tmp_path: Path) -> None:
    train_one_round(tmp_path / "store")
    (tmp_path / "store/round-000001/replica-1.result.json").unlink()
    exchange = make_rounds(tmp_path / "store", 0, 2, timeout=0.1)
    exchange.take_step()
    with pytest.raises(DataError, match="replicas: round 1 has no result of replica 1 after 0.1 seconds"):
        exchange.finish()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {"sync_every": 7}}, "sync_every 3 and not 7"),
        ({"replicas": 2}, "replicas 1 and not 2"),
        ({"outer": OuterOptimizer(lr=0.5)}, r"outer .*0\.7.* and not .*0\.5.*"),
        ({"seed": 1}, "weights [0-9a-f]{64} and not [0-9a-f]{64}"),
    ],
)
def test_other_settings_or_weights_are_an_error(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    first = make_rounds(tmp_path)
    first.synchronise(Learner().train(first.weights, 0))
    with pytest.raises(ConfigError, match=f"round-000001/replica-0.json was made with {said}"):
        make_rounds(tmp_path, **change).is_marked()


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    local = weights_of()
    local["inner.0.weight"][1, 2] = torch.nan
    with pytest.raises(DataError, match="this replica's weights are not finite after round 1"):
        make_rounds(tmp_path).synchronise(local)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replica", [2, -1])
def test_the_number_of_the_replica_is_checked(replica: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"replica: it is {replica}; number the 2 replicas from 0"):
        make_rounds(tmp_path, replica, 2)
