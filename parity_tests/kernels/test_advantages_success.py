"""Advantages by how often a prompt is solved: against all groups of k, and against their formula."""

import math
from itertools import combinations
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.advantages import a2po, bnpo, pass_at_k_training
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import grouped_rewards

masked = st.sampled_from([0.0, 0.3, 1.0])
seeds = st.integers(0, 99)


def unmasked_rows(ids: Tensor, seed: int, share: float) -> Tensor:
    return torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) >= share


@given(grouped=grouped_rewards(), seed=seeds, share=masked, k=st.integers(1, 7))
def test_pass_at_k_training_is_the_mean_over_all_groups_of_k(
    grouped: tuple[Tensor, Tensor], seed: int, share: float, k: int
) -> None:
    """A group of k is worth 1 if one of it succeeds; a row has the mean over the groups that it is in."""
    _, ids = grouped
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-1, 2, ids.shape, generator=g).to(torch.float64)
    unmasked, expected = unmasked_rows(ids, seed, share), torch.zeros_like(rewards)
    for i in ids.unique():
        rows = ((ids == i) & unmasked).nonzero().flatten().tolist()
        groups = list(combinations(rows, min(k, len(rows))))
        worth = [float(any(rewards[j] > 0 for j in one)) for one in groups] if rows else []
        for row in rows:
            mine = [x for one, x in zip(groups, worth, strict=True) if row in one]
            deviation = math.sqrt(max(0.0, fmean([x * x for x in worth]) - fmean(worth) ** 2))
            expected[row] = (fmean(mine) - fmean(worth)) / (deviation + 0.01) if deviation > 1e-9 else 0.0
    ours = pass_at_k_training(torch.where(unmasked, rewards, torch.nan), ids, unmasked, k=k, eps=0.01)
    assert_parity(ours, expected, terms=64, magnitude=100.0)


def test_bnpo_of_one_prompt_or_of_prompts_as_hard_is_the_plain_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    for ids in (torch.zeros(4, dtype=torch.long), torch.tensor([0, 0, 1, 1])):
        assert bnpo(rewards, ids).tolist() == [0.5, -0.5, -0.5, 0.5]


@given(seed=seeds, beta=st.sampled_from([0.1, 0.5, 3.0]), share=masked)
def test_a2po_equals_its_formula(seed: int, beta: float, share: float) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, reference = torch.rand(5, generator=g).double(), torch.rand(5, 3, generator=g).double()
    unmasked = unmasked_rows(rewards, seed, share)
    values = [beta * math.log(fmean([math.exp(x / beta) for x in row])) for row in reference.tolist()]
    expected = torch.where(unmasked, rewards - torch.tensor(values, dtype=torch.float64), 0.0)
    ours = a2po(torch.where(unmasked, rewards, torch.nan), reference, unmasked, beta=beta)
    assert_parity(ours, expected, terms=3, magnitude=10.0)
    assert torch.equal(a2po(rewards, reference, beta=beta)[unmasked], ours[unmasked])


@pytest.mark.parametrize("beta", [1e-3, 0.5, 1e4])
def test_a2po_counts_from_the_best_reward_to_the_mean_without_overflow(beta: float) -> None:
    reference = torch.tensor([[0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    (value,) = (-a2po(torch.zeros(1, dtype=torch.float64), reference, beta=beta)).tolist()
    wanted = {1e-3: 1 - 1e-3 * math.log(2), 0.5: 0.5 * math.log((1 + math.exp(2)) / 2), 1e4: 0.5}[beta]
    assert value == pytest.approx(wanted, rel=1e-4 if beta == 1e4 else 1e-12)
