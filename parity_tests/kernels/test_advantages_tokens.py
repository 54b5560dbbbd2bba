"""Advantages per token and of several rewards, against plain loops."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.advantages import (
    discounted_returns,
    gae,
    gdpo,
    length_adaptive_gae,
    optimal_token_baseline,
    reinforce_pp,
    remax,
    tir_optimal_token_baseline,
)
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import grouped_rewards, token_batches

Batch = dict[str, Tensor]
GAMMAS = st.sampled_from([0.0, 0.9, 1.0])  # 0.5 would hide a gamma in float32
VARIANCE_EPS = 0.01
# The first tokens are certain, so that the weights of an optimal baseline sum to 0.
CERTAIN: Batch = {
    "old_logprobs": torch.tensor([[0.0, -2.1], [0.0, -0.4]], dtype=torch.float64),
    "advantages": torch.tensor([[1.2], [0.5]], dtype=torch.float64),
    "mask": torch.ones(2, 2, dtype=torch.bool),
}


def backwards(mask: Tensor, step: Callable[[int, int, int | None], float]) -> Tensor:
    """`step(row, token, next unmasked token)` of every unmasked token, the last of a row first."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for i, masks in enumerate(mask.tolist()):
        following = None
        for t in reversed(range(len(masks))):
            if masks[t]:
                result[i, t] = step(i, t, following)
                following = t
    return result


def returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    out: dict[tuple[int, int | None], float] = {}

    def step(i: int, t: int, following: int | None) -> float:
        out[i, t] = float(rewards[i, t]) + gamma * out.get((i, following), 0.0)
        return out[i, t]

    return backwards(mask, step)


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    unmasked = x[mask].tolist()
    if len(unmasked) < 2:
        return torch.zeros_like(x)
    mean = math.fsum(unmasked) / len(unmasked)
    variance = math.fsum((v - mean) ** 2 for v in unmasked) / (len(unmasked) - 1)
    return torch.where(mask, (x - mean) / math.sqrt(variance + VARIANCE_EPS), 0.0)


def scale(batch: Batch) -> dict[str, float]:
    largest = sum(float(batch[name].abs().max()) for name in ("advantages", "logprobs", "old_logprobs"))
    tokens = batch["mask"].shape[-1]
    return {"terms": batch["mask"].numel(), "magnitude": largest * tokens / VARIANCE_EPS}


@given(batch=token_batches(), gamma=GAMMAS)
def test_reinforce_pp_equals_loops(batch: Batch, gamma: float) -> None:
    rewards, mask = batch["logprobs"], batch["mask"]
    expected = returns(rewards, mask, gamma)
    junk = with_junk(rewards, mask)
    assert_parity(discounted_returns(junk, mask, gamma=gamma), expected, **scale(batch))
    ours = reinforce_pp(junk, mask, gamma=gamma, variance_eps=VARIANCE_EPS)
    assert_parity(ours, whitened(expected, mask), **scale(batch))


@given(batch=token_batches())
def test_remax_equals_loops(batch: Batch) -> None:
    rewards, mask, baselines = batch["logprobs"], batch["mask"], batch["advantages"].squeeze(-1)
    expected = torch.where(mask, returns(rewards, mask, 1.0) - baselines.unsqueeze(-1), 0.0)
    assert_parity(remax(with_junk(rewards, mask), baselines, mask), expected, **scale(batch))


@pytest.mark.parametrize("adaptive", [False, True])
@given(batch=token_batches(), gamma=GAMMAS, lam=GAMMAS, alpha=st.sampled_from([0.05, 0.3, 0.9, 4.0]))
def test_gae_and_length_adaptive_gae_equal_loops(
    batch: Batch, gamma: float, lam: float, alpha: float, adaptive: bool
) -> None:
    rewards, values, mask = batch["logprobs"], batch["old_logprobs"], batch["mask"]
    out: dict[tuple[int, int | None], float] = {}

    def step(i: int, t: int, following: int | None) -> float:
        decay = max(0.0, 1 - 1 / (alpha * sum(mask[i].tolist()))) if adaptive else lam
        ahead = 0.0 if following is None else float(values[i, following])
        delta = float(rewards[i, t]) + gamma * ahead - float(values[i, t])
        out[i, t] = delta + gamma * decay * out.get((i, following), 0.0)
        return out[i, t]

    expected = backwards(mask, step)
    inputs = with_junk(rewards, mask), with_junk(values, mask), mask
    kernel = partial(length_adaptive_gae, alpha=alpha) if adaptive else partial(gae, lam=lam)
    assert_parity(kernel(*inputs, gamma=gamma, whiten=False), expected, **scale(batch))
    ours = kernel(*inputs, gamma=gamma, variance_eps=VARIANCE_EPS)
    assert_parity(ours, whitened(expected, mask), **scale(batch))


@given(
    batch=token_batches(),
    seed=st.integers(0, 99),
    alone=st.sampled_from(["zero", "raw"]),
    weighted=st.booleans(),
    by_token=st.booleans(),
    eps=st.sampled_from([0.0, 0.01]),
)
@example(batch=CERTAIN, seed=9, alone="zero", weighted=False, by_token=False, eps=0.0)
def test_optimal_token_baseline_equals_loops(
    batch: Batch, seed: int, alone: str, weighted: bool, by_token: bool, eps: float
) -> None:
    rewards, old, mask = batch["advantages"].expand(batch["mask"].shape), batch["old_logprobs"], batch["mask"]
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 2, (len(mask),), generator=g)
    share, weights = torch.rand(2, *mask.shape, generator=g, dtype=torch.float64)
    squared = old.exp() ** 2 + share * (1 - old.exp()) ** 2
    earned = returns(rewards, mask, 1.0)

    def norm(i: int, t: int) -> float:
        one = 1 - 2 * math.exp(float(old[i, t])) + float(squared[i, t])
        return one * (float(weights[i, t]) ** 2 if weighted else 1.0)

    def norm_so_far(i: int, t: int) -> float:
        return math.fsum(norm(i, u) for u in range(t + 1) if mask[i, u])

    def place(i: int, t: int) -> int:
        return sum(mask[i, :t].tolist()) if by_token else t

    def step(i: int, t: int, following: int | None) -> float:
        there = [
            (j, u) for j, u in mask.nonzero().tolist() if ids[j] == ids[i] and place(j, u) == place(i, t)
        ]
        if len(there) == 1:
            return float(earned[i, t]) if alone == "raw" else 0.0
        norms = [norm_so_far(*one) for one in there]
        if not (total := math.fsum(norms) + eps):  # every token so far was certain
            norms, total = [1.0] * len(there), float(len(there))
        returned = [float(earned[tuple(one)]) for one in there]
        return float(earned[i, t]) - math.fsum(map(math.prod, zip(norms, returned, strict=True))) / total

    kernel = tir_optimal_token_baseline if by_token else optimal_token_baseline
    option = {"correction_weights": with_junk(weights, mask)} if weighted else {}
    given_ = (with_junk(x, mask) for x in (rewards, old, squared))
    ours = kernel(*given_, ids, mask, alone=alone, eps=eps, **option)
    # The sum of the weights may nearly cancel: 1 - 2 pi + its square is 0 for a certain token.
    expected = backwards(mask, step)
    assert_parity(ours, expected, terms=mask.numel(), magnitude=1000 * (1 + float(expected.abs().max())))


def test_equal_returns_have_no_advantage_and_certain_tokens_the_plain_mean_as_baseline() -> None:
    ids, mask = torch.zeros(3, dtype=torch.long), torch.ones(3, 1, dtype=torch.bool)
    old, squared = torch.full((3, 1), -0.7), torch.rand(3, 1)
    assert not optimal_token_baseline(torch.full((3, 1), 0.1), old, squared, ids, mask).any()
    rewards, certain = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(3, 1)
    ours = optimal_token_baseline(rewards, certain, torch.ones(3, 1), ids, mask)
    assert ours.flatten().tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_a_row_of_40_tokens_equals_loops(gamma: float) -> None:
    """A scan doubles its step: 16 tokens tell nothing of the step after 8."""
    g = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(3, 40, generator=g, dtype=torch.float64), torch.rand(3, 40, generator=g) < 0.8
    wanted = returns(rewards, mask, gamma)
    assert_parity(discounted_returns(rewards, mask, gamma=gamma), wanted, terms=40, magnitude=40.0)


def test_a_long_sequence_is_discounted_without_underflow() -> None:
    """A ratio of cumulative products would divide by 0.9 ** 4000, which is 0."""
    rewards, mask = torch.ones(1, 4000), torch.ones(1, 4000, dtype=torch.bool)
    ours = discounted_returns(rewards, mask, gamma=0.9)
    assert_parity(ours[:, :3000], torch.full((1, 3000), 10.0), terms=200, dtype=torch.float32)


def test_a_single_token_or_equal_returns_are_whitened_to_zero() -> None:
    for rewards in (torch.tensor([[0.1]]), torch.tensor([[0.0, 0.1], [0.1, 0.1]])[:, 1:]):
        assert not reinforce_pp(rewards, torch.ones_like(rewards, dtype=torch.bool)).any()


@given(
    grouped=grouped_rewards(),
    seed=st.integers(0, 99),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    by_length=st.booleans(),
)
def test_gdpo_equals_loops(
    grouped: tuple[Tensor, Tensor], seed: int, missing: float, by_length: bool
) -> None:
    rewards, ids = grouped
    g = torch.Generator().manual_seed(seed)
    components = torch.stack([rewards, torch.randint(0, 3, rewards.shape, generator=g).double()], 1)
    scored = torch.rand(components.shape, generator=g) >= missing
    unmasked = torch.rand(len(ids), generator=g) >= missing / 2
    weights = torch.tensor([1.0, 0.25], dtype=torch.float64)
    lengths = torch.randint(1, 6, ids.shape, generator=g) if by_length else torch.ones_like(ids)
    counted = scored & unmasked.unsqueeze(1)
    total = torch.zeros(len(ids), dtype=torch.float64)
    for k in range(2):
        for i in ids.unique():
            rows = (ids == i) & counted[:, k]
            x = components[rows, k]
            if len(x) > 1 and x.max() > x.min():
                total[rows] += weights[k] * (x - x.mean()) / (x.std() + 0.1)
    rows = counted.any(1)
    repeated = total[rows].repeat_interleave(lengths[rows])
    expected = torch.zeros_like(total)
    if len(repeated) > 1 and repeated.max() > repeated.min():
        expected[rows] = (total[rows] - repeated.mean()) / ((repeated.var() + 0.01).sqrt() + 0.1)
    ours = gdpo(
        torch.where(counted, components, torch.nan),
        ids,
        unmasked,
        lengths=lengths if by_length else None,
        component_weights=weights,
        component_mask=scored,
        eps=0.1,
        batch_eps=0.1,
        variance_eps=0.01,
    )
    largest = 1000 * max(1.0, float(rewards.abs().max()))
    assert_parity(ours, expected, terms=5 * len(ids), magnitude=largest)
