"""Stamps on nodes: where the numbers land, what the loss does with them, and what is rejected."""

import copy
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.adapters.prime_rl_plugin.stamps import (
    SMALLEST,
    check_trace,
    dpo_coefficient,
    stamp_plain,
    stamp_reference,
    stamp_replay_pair,
)
from composer_plugins.adapters.prime_rl_plugin.upstream import check_node_type
from composer_plugins.adapters.prime_rl_plugin.values import MARKED, RUN
from composer_plugins.conformance.stubs import Empty
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.kernels.preference import dpo
from composer_plugins.losses.calling import _check_not_positive
from composer_plugins.losses.inputs import LARGEST_LOGPROB
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import prime_rl_nodes as double
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_nodes import Branch, MessageNode, Trace, answer, prompt

REPLAY_ONLY = {"policy_weight": 0.0, "replay_weight": 1.0}


def turn(draw: random.Random, length: int) -> MessageNode:
    """A sampled node with a reference: two tokens of the template, then `length` sampled ones."""
    node = answer(
        [draw.randrange(99) for _ in range(length + 2)], [-draw.expovariate(1) for _ in range(length)]
    )
    node.reference_logprobs = [-draw.expovariate(1) for _ in range(length)]
    return node


def completion(seed: int, *lengths: int) -> list[MessageNode]:
    draw = random.Random(seed)
    return [turn(draw, length) for length in lengths]


def branch(nodes: list[MessageNode]) -> Branch:
    """The nodes as an episode: a prompt, and a tool's answer between two turns."""
    between = [one for node in nodes for one in (node, prompt(7, 8))]
    return Branch([prompt(1, 2, 3), *between[:-1]])


def replayed(nodes: list[list[MessageNode]], **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of each completion as PRIME-RL calls us on them."""
    results = []
    for given in double.inputs(double.samples(Trace([branch(one) for one in nodes]))):
        loss = loss_fn(given, **REPLAY_ONLY | kwargs).loss
        results.append((loss.detach(), torch.autograd.grad(loss, given.trainer_logprobs)[0]))
    return results


def dpo_gradients(pair: list[list[MessageNode]], beta: float) -> list[Tensor]:
    """Autograd through the kernel, on what the nodes hold before they are stamped."""
    made = double.samples(Trace([branch(nodes) for nodes in pair]))
    policy = [torch.tensor(s.logprobs, dtype=torch.float64, requires_grad=True) for s in made]
    reference = [torch.tensor(s.ref_logprobs, dtype=torch.float64) for s in made]
    scores = [x[s.mask].sum()[None] for x, s in zip([*policy, *reference], made * 2, strict=True)]
    return list(torch.autograd.grad(dpo(*scores, beta=beta).loss.sum(), policy))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("beta", "weight"), [(0.1, 1.0), (0.5, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize("lengths", [((4,), (7,)), ((1,), (1,)), ((3, 5), (2, 1, 6))])
def test_a_stamped_pair_has_dpos_gradient_at_the_policy_that_sampled(
    seed: int, beta: float, weight: float, lengths: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    pair = [completion(2 * seed + i, *one) for i, one in enumerate(lengths)]
    expected = dpo_gradients(pair, beta)
    stamp_replay_pair(pair[0], pair[1], beta=beta, weight=weight)
    for (_, gradient), theirs in zip(replayed(pair), expected, strict=True):
        assert_parity(gradient, weight * theirs, terms=20)
        assert float((gradient - weight * theirs).abs().max()) <= 1e-12


def test_a_replay_weight_of_tokens_over_pairs_makes_it_dpos_mean_over_pairs() -> None:
    """PRIME-RL divides by all tokens of the global batch: here of two pairs and one completion without."""
    pairs = [[completion(1, 4), completion(2, 7)], [completion(3, 2), completion(4, 9)]]
    expected = [gradient / len(pairs) for pair in pairs for gradient in dpo_gradients(pair, 0.1)]
    for chosen, rejected in pairs:
        stamp_replay_pair(chosen, rejected, beta=0.1)
    nodes = [one for pair in pairs for one in pair] + [completion(5, 30)]
    sequences = double.inputs(double.samples(Trace([branch(one) for one in nodes])))
    tokens = sum(int(given.loss_mask.sum()) for given in sequences)
    assert tokens == 4 + 7 + 2 + 9 + 30
    kwargs = {"policy_weight": 0.0, "replay_weight": tokens / len(pairs)}
    for given, wanted in zip(sequences, expected, strict=False):
        gradient = torch.autograd.grad(loss_fn(given, **kwargs).loss / tokens, given.trainer_logprobs)[0]
        assert_parity(gradient, wanted, terms=40)
    docs = (ROOT / "docs" / "prime_rl.md").read_text()
    assert "`replay_weight` = tokens / pairs" in docs
    assert "tokens / pairs" in str(stamp_replay_pair.__doc__) and "tokens / pairs" in str(loss_fn.__doc__)


@pytest.mark.parametrize("stamps", ["both turns", "one turn", "both turns, one certain", "one short turn"])
def test_a_branch_that_is_stamped_in_part_is_a_warning(stamps: str) -> None:
    """A teacher who is certain of every token is none: its 0.0 is stamped as a number below 0."""
    certain, expected = "certain" in stamps, nullcontext()
    nodes = completion(3, 12, RUN + certain - ("short" in stamps))
    nodes[1].reference_logprobs = None
    if "both" in stamps:
        stamp_reference(nodes[1], [*[0.0 if certain else -0.5] * RUN, *[-0.5] * certain])
    if stamps == "one turn":
        expected = pytest.warns(ComposerWarning, match="ref_logprobs: 8 or more neighbouring tokens have 0.0")
    (given,) = double.inputs(double.samples(Trace([branch(nodes)])))
    with expected:
        found = loss_fn(given, hint_weight=0.625, policy_weight=0.0).loss
    if certain:  # the numbers are those of 0.0
        given.ref_logprobs = torch.where(given.ref_logprobs > -1e-30, 0.0, given.ref_logprobs)
        with pytest.warns(ComposerWarning, match="ref_logprobs: 8 or more"):
            assert torch.equal(
                loss_fn(given, hint_weight=0.625, policy_weight=0.0, policy="reinforce").loss, found
            )


def test_the_policy_loss_leaves_a_pair_alone_and_trains_its_neighbours() -> None:
    pair, plain = [completion(1, 3), completion(2, 3)], completion(3, 4)
    plain[0].reference_logprobs = None
    stamp_replay_pair(*pair)
    sequences = double.inputs(double.samples(Trace([branch(nodes) for nodes in (*pair, plain)])))
    for given in sequences:
        given.advantages = torch.ones_like(given.advantages)
    losses = [loss_fn(given, policy="reinforce", policy_weight=1.0) for given in sequences]
    gradients = [
        torch.autograd.grad(out.loss, given.trainer_logprobs)[0]
        for out, given in zip(losses, sequences, strict=True)
    ]
    assert not gradients[0].any() and not gradients[1].any()
    assert torch.equal(gradients[2] != 0, sequences[2].loss_mask)


def test_a_saturated_pair_stays_in_the_loss_with_the_smallest_weight() -> None:
    """A weight of 0 takes a token out of the mask, and all zeros are no weights: each token at 1."""
    pair = [[answer([5, 6], [-0.1, -0.1])], [answer([5, 7], [-9e4, -9e4])]]
    pair[0][0].reference_logprobs, pair[1][0].reference_logprobs = [-9e4] * 2, [-0.1] * 2
    assert stamp_replay_pair(*pair) == SMALLEST
    assert torch.tensor(SMALLEST, dtype=torch.float32) > 0
    made = double.samples(Trace([branch(nodes) for nodes in pair]))
    for sign, sample in zip((1, -1), made, strict=True):
        assert sample.rl_weights == [0.0] * 3 + [sign * SMALLEST] * 2
    assert [given.loss_mask.sum() for given in double.inputs(made, torch.float32)] == [2, 2]


@pytest.mark.parametrize("margin", [-1e300, -800.0, -3.0, 0.0, 3.0, 60.0])
def test_the_coefficient_is_minus_the_gradient_of_the_kernel(margin: float) -> None:
    u = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(dpo(u, zero, zero, zero, beta=0.7).loss.sum(), u)
    assert math.isclose(dpo_coefficient(margin, beta=0.7, weight=2.0), -2 * float(gradient), rel_tol=1e-14)


def test_a_reference_lands_on_the_sampled_tokens_and_on_no_other() -> None:
    nodes = completion(1, 3, 2)
    for i, node in enumerate(nodes):
        stamp_reference(node, [-0.5 - i] * sum(node.mask))
    (sample,) = double.samples(Trace([branch(nodes)]))
    expected = [0.0] * 5 + [-0.5] * 3 + [0.0] * 4 + [-1.5] * 2
    assert sample.ref_logprobs == expected
    assert sample.rl_weights is None


def test_a_stamp_takes_what_the_check_of_a_losss_inputs_takes_in_half_precision() -> None:
    for value in (1e-4, LARGEST_LOGPROB):
        node = answer([1, 2], [-0.1, -0.2])
        stamp_reference(node, [value, -0.3])
        assert node.reference_logprobs == [-SMALLEST, -0.3]  # 0.0 is what PRIME-RL writes without a stamp
        _check_not_positive("teacher_logprobs", torch.tensor([value, -0.3], dtype=torch.bfloat16))
    with pytest.raises(DataError, match="where bfloat16 has rounded it"):
        stamp_reference(answer([1, 2], [-0.1, -0.2]), [1.1 * LARGEST_LOGPROB, -0.3])
    with pytest.raises(DataError, match="where bfloat16 has rounded it"):
        wrong = torch.tensor([1.1 * LARGEST_LOGPROB, -0.3], dtype=torch.bfloat16)
        _check_not_positive("teacher_logprobs", wrong)
    assert LARGEST_LOGPROB < MARKED


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([-1.0, -1.0, -1.0], "3 numbers for 2 tokens; pass one number per token"),
        ([-1.0, -1e39], r"-1e\+39 at position 1; pass finite numbers, within the range of float32"),
        ([-1e-60, -1e-60], r"exactly 0.0 in float32"),
        ([float("-inf"), -1.0], "-inf at position 0"),
    ],
)
def test_what_is_no_reference_is_rejected_and_stamps_nothing(values: Any, said: str) -> None:
    node = answer([1, 2, 3], [-0.1, -0.2])
    with pytest.raises(DataError, match=said):
        stamp_reference(node, values)
    assert node.reference_logprobs is None


@pytest.mark.parametrize("stamp", [lambda node: stamp_reference(node, [-1.0] * 2), stamp_plain])
def test_a_node_that_was_not_sampled_is_not_stamped(stamp: Callable[[MessageNode], None]) -> None:
    fabricated = answer([1, 2], [-1.0, -1.0])
    fabricated.sampled = False
    for node in (prompt(1, 2), fabricated):
        with pytest.raises(DataError, match="did not sample"):
            stamp(node)


def test_a_token_carries_a_hint_or_a_pair() -> None:
    pair = [completion(1, 2), completion(2, 2)]
    stamp_replay_pair(*pair)
    (node,) = pair[0]
    with pytest.raises(DataError, match="a hint or a pair"):
        stamp_reference(node, [-1.0, -1.0])
    with pytest.raises(DataError, match="overwrite"):
        stamp_plain(node)
    with pytest.raises(DataError, match="belongs to a pair already"):
        stamp_replay_pair(*pair)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda node: setattr(node, "reference_logprobs", None), "a node has no reference"),
        (lambda node: setattr(node, "reference_logprobs", [-1.0]), "1 numbers for 3 tokens"),
        (lambda node: setattr(node, "logprobs", [-1.0, -2.0]), "logprobs: 2 numbers for 3 tokens"),
    ],
)
def test_a_pair_that_is_rejected_stays_unstamped(change: Callable[[Any], None], said: str) -> None:
    pair = [completion(1, 2, 3), completion(2, 2, 3)]
    change(pair[1][1])
    before = copy.deepcopy(pair)
    with pytest.raises(DataError, match=said):
        stamp_replay_pair(*pair)
    assert pair == before


def test_a_pair_takes_single_nodes_and_none_in_common() -> None:
    (a,), (b,) = completion(1, 2), completion(2, 2)
    with pytest.raises(DataError, match="what both completions have in common"):
        stamp_replay_pair([a, b], [b])
    with pytest.raises(DataError, match="a completion has no nodes"):
        stamp_replay_pair(a, [])
    with pytest.raises(DataError, match="pair: a node is in it twice; pass each node once"):
        stamp_replay_pair([a, a], b)
    assert stamp_replay_pair(a, b) > 0


@pytest.mark.parametrize(
    "options",
    [
        *[{"beta": value} for value in (0.0, float("nan"))],
        *[{"weight": value} for value in (-1.0, 0.0, float("inf"))],
    ],
)
def test_a_pair_without_a_positive_weight_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: .*is not a positive number"):
        stamp_replay_pair(completion(1, 2), completion(2, 2), **options)


def test_a_plain_node_keeps_weight_1_beside_a_pair_and_its_other_streams() -> None:
    first, second = completion(1, 2, 2)
    first.reference_logprobs, first.loss_weights = None, {"ce": [0.5] * 4}
    rejected = completion(2, 2)
    stamp_replay_pair(second, rejected, beta=1.0)
    with pytest.raises(DataError, match="weights of a branch: 1 of 2 trained nodes have one"):
        check_trace(branch([first, second]).nodes)
    stamp_plain(first)
    check_trace(Trace([branch([first, second]), branch(rejected)]))
    assert first.loss_weights == {"ce": [0.5] * 4, "rl": [0.0, 0.0, 1.0, 1.0]}


def test_a_reference_on_part_of_a_branch_is_found() -> None:
    nodes = completion(1, 2, 2)
    nodes[0].reference_logprobs = None
    with pytest.raises(DataError, match="references of a branch: 1 of 2 trained nodes have one"):
        check_trace(Trace([branch(nodes)]))
    check_trace(Trace([branch(nodes[:1]), branch(nodes[1:])]))  # a sample each
    check_trace(Trace([branch(nodes[:1]), branch(nodes)]))  # the first node is context in the second


OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({"reference_logprobs": [-1.0]}, "1 numbers for 2 tokens"),
    ({"reference_logprobs": [-1.0, 0.25]}, "it holds 0.25 at position 1, and a log-probability is at most 0"),
    ({"reference_logprobs": [1.0, -1.0]}, "its mark is at 1 of 2"),
    ({"reference_logprobs": [1.0]}, "its mark is at 1 of 2"),
    ({"reference_logprobs": [1.0, 1.0]}, "its mark is at 2 of 2 sampled tokens without weights"),
    ({"loss_weights": {"rl": [0.0] * 4}}, "all 0.0"),
    ({"loss_weights": {"rl": [1.0] * 2}}, "weights: 2 numbers for 4 tokens"),
    ({"loss_weights": {"rl": [0.0, 0.0, 1.0, math.nan]}}, "nan at position 3"),
]


@pytest.mark.parametrize(("stamped", "said"), OTHERWISE)
def test_a_stamp_that_prime_rl_or_the_loss_reads_otherwise_is_found(
    stamped: dict[str, Any], said: str
) -> None:
    (node,) = nodes = completion(1, 2)
    check_trace(nodes)
    vars(node).update(stamped)
    with pytest.raises(DataError, match=said):
        check_trace(Trace([branch(nodes)]))


def test_a_certain_turn_of_a_branch_with_a_reference_passes() -> None:
    nodes = completion(1, 2, 2)
    nodes[0].reference_logprobs = [0.0, 0.0]
    check_trace(nodes)
    nodes[1].reference_logprobs = [0.0, 0.0]
    with pytest.raises(DataError, match="exactly 0.0"):
        check_trace(nodes)


def test_a_hint_on_every_node_that_is_no_pairs_passes() -> None:
    hinted, chosen = completion(1, 2, 2)
    stamp_replay_pair(chosen, completion(2, 2))
    stamp_plain(hinted)
    check_trace([hinted, chosen])


def test_an_old_verifiers_is_rejected_with_the_remedy() -> None:
    check_node_type(MessageNode)
    old: Any = double.OldMessageNode([1], [True], [-1.0], sampled=True)
    for call in (lambda: check_node_type(type(old)), lambda: stamp_reference(old, [-1.0])):
        with pytest.raises(ConfigError, match="4bcb48e55.*0.8.1.dev52.*echo_filter"):
            call()


def test_the_real_branch_spreads_stamps_as_the_double_does() -> None:
    found = pytest.importorskip("verifiers.v1.graph", reason="needs verifiers, and no package index has it")
    if isinstance(found, Empty):
        pytest.skip("needs verifiers, and a stub is in its place")
    from verifiers.v1 import graph, trace, types

    check_node_type(graph.MessageNode)
    pair = [completion(1, 3, 2), completion(2, 4)]
    said = types.AssistantMessage(content="x")
    made = [[graph.MessageNode(message=said, **vars(node)) for node in branch(one).nodes] for one in pair]
    real = [trace.Branch(index=i, nodes=nodes) for i, nodes in enumerate(made)]
    coefficient = stamp_replay_pair(*pair)
    assert coefficient == stamp_replay_pair(*([n for n in one.nodes if n.sampled] for one in real))
    for one, sample in zip(real, double.samples(Trace([branch(nodes) for nodes in pair])), strict=True):
        assert one.reference_logprobs == sample.ref_logprobs
        assert one.loss_weights("rl") == sample.rl_weights
        wired = graph.MessageNode.model_validate(one.nodes[1].model_dump(mode="python"))
        assert wired.reference_logprobs == one.nodes[1].reference_logprobs
        assert wired.loss_weights == one.nodes[1].loss_weights
