"""Stamps from a store: by the echo filter of PRIME-RL 0.8, and on the nodes of later verifiers."""

from pathlib import Path
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin.stamps import check_trace
from composer_plugins.adapters.prime_rl_plugin.values import REPLAY
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.prime_rl.store import Store, StoreWriter
from composer_plugins.recipes.prime_rl.stored_stamps import echo_filter, stamp_from_store
from parity_tests.rigs import prime_rl_nodes as double
from parity_tests.rigs.prime_rl_nodes import Branch, Rollout, Trace, answer, prompt

HINT = [-9.0, -9.0, -9.0, -1.0, -2.0, -9.0, -3.0]  # -9 at tokens that the policy did not sample
PAIR = [0.5, 0.5, 0.5, 0.25, 0.25, 0.5, 0.25]


def trace() -> Trace:
    """Two branches that fork after the first turn: tokens 1 .. 7 and 1 .. 5, 8, 9."""
    first = answer([3, 4, 5], [-0.3, -0.4])
    fork = [[first, answer([6, 7], [-0.5])], [first, answer([8, 9], [-0.6])]]
    start = prompt(1, 2)
    return Trace([Branch([start, *nodes]) for nodes in fork])


def rollout() -> Rollout:
    made = trace()
    return Rollout(made.branches, double.samples(made))


def stored(path: Path, kind: Any, values: list[float], *token_ids: int) -> str:
    path = path / "a.store"
    with StoreWriter(path) as writer:
        writer.put(list(token_ids) or [1, 2, 3, 4, 5, 6, 7], values, kind)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "values", "reference", "weights"),
    [
        ("reference", HINT, [0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -3.0], None),
        (
            "replay",
            PAIR,
            [0.0, 0.0, 0.0, REPLAY, REPLAY, 0.0, REPLAY],
            [0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 0.25],
        ),
    ],
)
def test_the_filter_keeps_no_observation_and_stamps_the_samples(
    tmp_path: Path, kind: str, values: list[float], reference: list[float], weights: list[float] | None
) -> None:
    given = rollout()
    assert echo_filter(given, store=stored(tmp_path, kind, values)) == [[False] * 7, [False] * 7]
    assert (given.samples[0].ref_logprobs, given.samples[0].rl_weights) == (reference, weights)
    assert given.samples[1] == rollout().samples[1]  # without a record: as it was


def test_nodes_are_stamped_as_samples_are(tmp_path: Path) -> None:
    """What the orchestrator makes of stamped nodes is what the filter makes of the samples."""
    for kind, values in (("reference", HINT), ("replay", PAIR)):
        path, nodes, samples = stored(tmp_path / kind, kind, values), trace(), rollout()
        assert stamp_from_store(nodes, Store(path)) == 1
        echo_filter(samples, store=path)
        assert double.samples(nodes)[0] == samples.samples[0]
        filtered = trace()
        assert echo_filter(filtered, store=path) == [[False] * 7, [False] * 7]
        assert filtered == nodes


def test_a_node_in_two_branches_follows_the_first(tmp_path: Path) -> None:
    stored(tmp_path, "replay", PAIR)
    path = stored(tmp_path, "replay", [-x for x in PAIR], 1, 2, 3, 4, 5, 8, 9)
    nodes, samples = trace(), rollout()
    assert stamp_from_store(nodes, Store(path)) == 2
    check_trace(nodes)
    echo_filter(samples, store=path)
    weights = [sample.rl_weights for sample in double.samples(nodes)]
    assert weights == [sample.rl_weights for sample in samples.samples]
    assert weights == [[0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 0.25], [0.0] * 6 + [-0.25]]


def test_of_a_pair_and_a_hint_the_pair_is_taken(tmp_path: Path) -> None:
    stored(tmp_path, "reference", HINT)
    given = rollout()
    echo_filter(given, store=stored(tmp_path, "replay", PAIR))
    assert given.samples[0].rl_weights is not None


def test_records_that_are_written_during_a_run_are_seen(tmp_path: Path) -> None:
    path, before, after = stored(tmp_path, "replay", [1.0], 99), rollout(), rollout()
    echo_filter(before, store=path)
    assert before == rollout()
    stored(tmp_path, "replay", PAIR)
    echo_filter(after, store=path)
    assert after != rollout()


def test_a_pair_with_only_0_at_the_sampled_tokens_is_an_error(tmp_path: Path) -> None:
    path = stored(tmp_path, "replay", [-1.0, -1.0, -1.0, 0.0, 0.0, -1.0, 0.0])
    for given in (trace(), rollout()):
        with pytest.raises(DataError, match="it is 0.0 at every sampled token of 7"):
            echo_filter(given, store=path)
    # 4 and 5 are trained in the first branch; of its own the second has 9 alone
    path = stored(tmp_path / "2", "replay", [0.0, 0.0, 0.0, -1.0, -1.0, 0.0, 0.0], 1, 2, 3, 4, 5, 8, 9)
    with pytest.raises(DataError, match="it is 0.0 at every sampled token of 7"):
        stamp_from_store(trace(), Store(path))


def test_a_stored_hint_does_not_leave_a_pairs_weights_on_a_node(tmp_path: Path) -> None:
    given = trace()
    stamp_from_store(given, Store(stored(tmp_path / "pairs", "replay", PAIR)))
    with pytest.raises(DataError, match="a hint or a pair for a token, not both"):
        stamp_from_store(given, Store(stored(tmp_path / "hints", "reference", HINT)))


def test_what_cannot_carry_a_stamp_is_rejected(tmp_path: Path) -> None:
    path = stored(tmp_path, "replay", PAIR)
    node: Any = double.OldMessageNode([1, 2, 3, 4, 5, 6, 7], [True] * 7, [-1.0] * 7, sampled=True)
    with pytest.raises(ConfigError, match="4bcb48e55"):
        stamp_from_store(Trace([Branch([node])]), Store(path))
    with pytest.raises(ConfigError, match="there is no store"):
        echo_filter(rollout(), store=str(tmp_path / "nowhere"))
