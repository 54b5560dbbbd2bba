"""Every law that a loss must obey, and each formula computed again by a loop."""

import math
from collections.abc import Callable
from typing import Any

import torch
from my_losses.kernels import absolute_deviation, half_negative, logistic_margin
from my_losses.plugin import LOSSES

from composer_plugins.losses.row import Loss
from composer_plugins.testing import parametrize_with_checks
from composer_plugins.testing.assertions import assert_parity


@parametrize_with_checks(LOSSES)
def test_the_loss_obeys_the_law(loss: Loss, check: Callable[[Loss], Any]) -> None:
    check(loss)


def test_the_losses_are_found_by_name() -> None:
    from composer_plugins.losses.registry import losses

    assert {loss.name for loss in LOSSES} <= {loss.name for loss in losses()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_half_negative_equals_its_formula() -> None:
    logprobs, advantages = (random(3, 4).abs().neg() - 0.1).requires_grad_(), random(3, 4).flip(0)
    old, mask = logprobs.detach() - 0.2 * random(3, 4), random(3, 4) > -1
    loss = half_negative(logprobs, old, advantages, mask, scale=0.3).loss
    wanted, slopes = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    for i, j in mask.nonzero().tolist():
        a, logprob = float(advantages[i, j]), float(logprobs.detach()[i, j])
        slopes[i, j] = -math.exp(logprob - float(old[i, j])) * (0.3 * a if a < 0 else a)
        wanted[i, j] = slopes[i, j] * logprob
    assert_parity(loss, wanted, terms=1)
    assert_parity(torch.autograd.grad(loss.sum(), logprobs)[0], slopes, terms=1, what="gradient")


def test_logistic_margin_equals_its_formula() -> None:
    chosen, rejected = random(5), random(5).flip(0)
    margins = [1.5 * (c - r) - 0.4 for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    wanted = [math.log1p(math.exp(-margin)) for margin in margins]
    loss = logistic_margin(chosen, rejected, beta=1.5, margin=0.4).loss
    assert_parity(loss, torch.tensor(wanted, dtype=torch.float64), terms=2)


def test_absolute_deviation_equals_its_formula() -> None:
    rewards, groups = random(6), [7, 7, 3, 7, 3, 9]
    wanted = []
    for reward, group in zip(rewards.tolist(), groups, strict=True):
        mine = [r for r, g in zip(rewards.tolist(), groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        wanted.append((reward - mean) / (sum(abs(r - mean) for r in mine) / len(mine) + 1e-6))
    found = absolute_deviation(rewards, torch.tensor(groups))
    assert_parity(found, torch.tensor(wanted, dtype=torch.float64), terms=6)
