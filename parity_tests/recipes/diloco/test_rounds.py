"""Rounds over an object store: what counts is decided once, and every replica takes the same step."""

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import OuterOptimizer, pseudo_gradient, weights_hash
from composer_plugins.recipes.diloco.rounds import Commit, Rounds
from parity_tests.recipes.diloco.tiny import (
    SETTINGS,
    Learner,
    commits_of,
    joined,
    make_rounds,
    read_lines,
    reference,
    run_replica,
    weights_of,
)

REPLICAS, ROUNDS = 3, 6


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"memory:/{tmp_path}"


def run_threads(url: str, log: Path, replicas: Sequence[dict[str, Any]], rounds: int = ROUNDS) -> Any:
    """Run the replicas, each with its options, in threads; return their commits."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        runs = [
            pool.submit(run_replica, url, number, len(replicas), rounds, log=str(log), **options)
            for number, options in enumerate(replicas)
        ]
        return [run.result() for run in runs]


def train(rounds: Rounds) -> Any:
    return Learner().train(rounds.state.weights, rounds.replica)


def test_every_round_equals_the_reference(url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    of_replicas = run_threads(url, log, [{}] * REPLICAS)
    expected = reference([(0, 1, 2)] * ROUNDS, read_lines(log))
    for commits in of_replicas:
        assert [commit.weights for commit in commits] == expected


def test_a_replica_that_is_too_slow_does_not_count_and_goes_on(tmp_path: Path) -> None:
    url, log = str(tmp_path / "store"), tmp_path / "log"
    run_threads(url, log, [{"timeout": 0.1, "pause": 0.02}] * 2 + [{"pause": 0.3}], rounds=30)
    commits = commits_of(url)
    participants = [commit.participants for commit in commits]
    assert (0, 1) in participants
    assert [commit.weights for commit in commits] == reference(participants, read_lines(log))


def test_the_round_is_what_was_committed_first(tmp_path: Path) -> None:
    """Replica 0 has seen both pseudo-gradients when replica 1 commits without it."""
    zero, one = (joined(tmp_path, number, 2) for number in (0, 1))
    for rounds in (zero, one):
        rounds.store.create(rounds.delta_name(rounds.replica), save(train(rounds)))
    found = {replica: one.read_delta(replica) or pytest.fail("it is not there") for replica in (0, 1)}
    assert one.propose({1: found[1]}).participants == (1,)
    assert zero.propose(found).participants == (1,)  # it proposed (0, 1)
    assert [commit.participants for commit in zero.conclude()] == [(1,)]
    assert weights_hash(zero.state.weights) == commits_of(str(tmp_path))[0].weights


def test_a_round_needs_a_quorum(tmp_path: Path) -> None:
    rounds = joined(tmp_path, 0, 2, quorum=2, timeout=0.1)
    said = "replicas: 1 finished round 1 within 0.1 seconds, and 2 are needed; missing: 1; start the missing"
    with pytest.raises(DataError, match=said):
        rounds.synchronise(train(rounds))
    assert commits_of(str(tmp_path)) == []


def test_training_starts_when_all_have_joined(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"replicas: 1 of 3 joined within 0\.1 seconds; start the others"):
        joined(tmp_path, 0, 3, others=False, timeout=0.1)
    # The record of a replica that gave up would count as joined, and the others would begin without it.
    assert ObjectStore(str(tmp_path)).names("replicas") == []


def test_a_torn_delta_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = save(weights_of())
    torn = [whole[: len(whole) // 2], b"", b"\x80\x04pickle", save({"w": torch.ones(1)})]
    for number, data in enumerate(torn):
        rounds = joined(tmp_path, 0, 2, timeout=0.1)
        assert rounds.round == number
        name = f"deltas/{number:06d}-1.safetensors"
        Path(tmp_path, name).write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert [commit.participants for commit in rounds.synchronise(train(rounds))] == [(0,)]
        rejected, alone = caplog.messages
        assert name in rejected
        assert alone.startswith(f"round {number + 1} was committed without replica 1, whose training did not")
    rounds = joined(tmp_path, 0, 2, timeout=0.1)
    rounds.quorum = 2
    Path(tmp_path, "deltas/000004-1.safetensors").write_bytes(whole[:-1])
    said = r"missing: 1 \(deltas/000004-1.safetensors is cut off or not a safetensors file\)"
    with pytest.raises(DataError, match=said):
        rounds.synchronise(train(rounds))


def test_old_objects_are_deleted_and_the_newest_state_is_loaded(url: str, tmp_path: Path) -> None:
    commits, _ = run_threads(url, tmp_path / "log", [{}] * 2)
    store = ObjectStore(url)
    assert store.names("states") == ["states/000004.safetensors", "states/000005.safetensors"]
    assert store.names("deltas") == [f"deltas/000005-{replica}.safetensors" for replica in (0, 1)]
    assert len(store.names("commits")) == ROUNDS
    again = joined(url, 1, 2)
    assert again.round == ROUNDS and weights_hash(again.state.weights) == commits[-1].weights
    assert weights_hash(again.state.momentum) == commits[-1].momentum


def test_without_the_newest_state_the_commits_after_the_older_are_repeated(tmp_path: Path) -> None:
    commits, _ = run_threads(str(tmp_path), tmp_path / "log", [{}] * 2)
    newest = tmp_path / "states/000005.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    said = "is cut off or changed; delete it: the state before it is then used"
    with pytest.raises(DataError, match=f"states/000005.safetensors in .* {said}"):
        joined(tmp_path, 0, 2)
    newest.unlink()
    again = joined(tmp_path, 0, 2)
    assert again.round == ROUNDS and weights_hash(again.state.weights) == commits[-1].weights


@pytest.mark.parametrize("has_published", [False, True])
def test_a_replica_whose_round_was_deleted_takes_the_newest_state(
    has_published: bool, tmp_path: Path
) -> None:
    """It slept, before or after it published, while the others trained on."""
    sleeper = joined(tmp_path, 2, 3)
    local = train(sleeper)
    if has_published:
        sleeper.store.create(sleeper.delta_name(2), save(pseudo_gradient(sleeper.state.weights, local)))
    other = joined(tmp_path, 0, 3, timeout=0.0)
    for _ in range(5):
        other.synchronise(train(other))
    before = sleeper.store.names("commits")
    commits = sleeper.synchronise(local)
    assert [commit.round for commit in commits] == [0, 1, 2, 3, 4]
    assert commits[0].participants == ((0, 2) if has_published else (0,))
    assert sleeper.round == 5 and sleeper.store.names("commits") == before
    assert weights_hash(sleeper.state.weights) == weights_hash(other.state.weights)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"settings": {"sync_every": 7}}, "sync_every is 3 there and 7 here"),
        ({"replicas": 4}, "replicas is 1 there and 4 here"),
        ({"outer": OuterOptimizer(lr=0.5)}, r"outer is .*0\.7.* there and .*0\.5.* here"),
        ({"seed": 1}, "initial_weights is"),
        ({"settings": {"sync_every": 3, "frozen_weights": "x"}}, "frozen_weights is None there"),
    ],
)
def test_a_store_of_another_run_is_an_error(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    joined(tmp_path)
    options = {name: change[name] for name in ("outer",) if name in change}
    other = make_rounds(ObjectStore(str(tmp_path)), 0, change.get("replicas", 1), **options)
    with pytest.raises(ConfigError, match=f"store: .* belongs to another run: {key}"):
        other.join(weights_of(change.get("seed", 0)), change.get("settings", SETTINGS))


def test_an_object_of_something_else_is_an_error(tmp_path: Path) -> None:
    joined(tmp_path)
    for content in ("", "[]", '{"round": 0}'):
        (tmp_path / "commits/000000.json").write_text(content)
        with pytest.raises(DataError, match="commits/000000.json: it is not a commit of this recipe"):
            joined(tmp_path)
    for content in ("", "{", "[]", '{"name": "something else"}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ConfigError, match="run.json in .* is not of this recipe; name an empty store"):
            joined(tmp_path)


def test_two_processes_with_one_number_are_an_error(tmp_path: Path) -> None:
    first, second = (joined(tmp_path, 0, 2, timeout=0.0) for _ in range(2))
    local = train(first)
    first.synchronise(local)
    local["inner.0.bias"] = local["inner.0.bias"] + 1
    with pytest.raises(DataError, match="another process publishes as replica 0; give every replica"):
        second.synchronise(local)


def test_a_store_that_overwrites_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that ignores If-None-Match."""

    def overwrite(self: ObjectStore, name: str, data: bytes) -> None:
        Path(self.root, name).write_bytes(data)

    monkeypatch.setattr(ObjectStore, "put_new", overwrite)
    with pytest.raises(ConfigError, match="creates an object that exists, so two replicas could commit"):
        joined(tmp_path)


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    rounds = joined(tmp_path)
    local = train(rounds)
    local["inner.0.weight"][1, 2] = torch.nan
    with pytest.raises(DataError, match="this replica's weights are not finite after round 1"):
        rounds.synchronise(local)
    assert rounds.store.names("deltas") == []


def test_another_result_than_the_commits_is_an_error(tmp_path: Path) -> None:
    """As it would be on a machine that rounds differently."""
    rounds = joined(tmp_path)
    rounds.store.create(rounds.delta_name(0), save(train(rounds)))
    name, gradient = rounds.read_delta(0) or pytest.fail("it is not there")
    state = rounds.next_state([gradient])
    state.weights["inner.0.bias"][0] += 1e-7
    hashes = {"weights": weights_hash(state.weights), "momentum": weights_hash(state.momentum)}
    commit = Commit(round=0, deltas={0: name}, **hashes)
    rounds.store.create("commits/000000.json", commit.model_dump_json().encode())
    with pytest.raises(DataError, match="after round 1 are not those of the commit; install the same build"):
        rounds.conclude()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replica": 2, "replicas": 2}, "replica: it is 2; number the 2 replicas from 0"),
        ({"replica": -1, "replicas": 2}, "replica: it is -1"),
        ({"replica": 0, "replicas": 2, "quorum": 3}, "quorum: it is 3; set a number from 1 to 2"),
        ({"replica": 0, "replicas": 2, "quorum": 0}, "quorum: it is 0"),
    ],
)
def test_the_options_are_checked(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        make_rounds(ObjectStore(str(tmp_path)), **options)


def test_a_replica_that_published_and_stopped_does_not_train_the_round_again(tmp_path: Path) -> None:
    stopped = joined(tmp_path, 0, 2, timeout=0.0)
    stopped.store.create(stopped.delta_name(0), save(train(stopped)))
    again = joined(tmp_path, 0, 2, timeout=0.0)
    assert again.round == 1 and commits_of(str(tmp_path))[0].participants == (0,)


def test_a_replica_that_is_gone_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round after its end waits until the timeout; the next ones do not, until it joins again."""
    clock = itertools.count()
    monkeypatch.setattr("composer_plugins.recipes.diloco.rounds.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("composer_plugins.recipes.diloco.rounds.time.sleep", lambda seconds: None)
    rounds = joined(tmp_path, 0, 2, timeout=50.0)

    def looks(end: Callable[[], Any]) -> int:
        before = next(clock)
        end()
        return next(clock) - before

    assert looks(lambda: rounds.synchronise(train(rounds))) > 50
    assert looks(lambda: rounds.synchronise(train(rounds))) < 10
    rounds.store.create("replicas/1-y.json", b"{}")
    assert looks(lambda: rounds.synchronise(train(rounds))) > 50
