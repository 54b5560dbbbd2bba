"""Clip-Cov and KL-Cov: infinities and NaN, how the draw behaves, where a generator can be traced."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_plugins.kernels.policy import clip_cov, kl_cov
from composer_plugins.kernels.types import TokenLoss

Batch = dict[str, Tensor]


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_kl_cov_penalises_a_log_probability_of_minus_infinity_infinitely(advantage: float) -> None:
    """Its covariance is -inf less a mean of -inf, NaN, which torch.topk and so verl take for the largest."""
    batch = even()
    batch["logprobs"][0, 1] = -math.inf
    batch["advantages"][0, 1] = advantage
    logprobs = batch["logprobs"].requires_grad_()
    ours = kl_cov(**batch, cov_ratio=1e-3)
    assert ours.metrics["penalty_frac"].value[0].tolist() == [False, True, False, False, False, False]
    assert ours.loss[0, 1] == math.inf and ours.loss[0, [0, 2, 3, 4, 5]].isfinite().all()
    assert torch.autograd.grad(ours.loss.sum(), logprobs)[0][0, 1] == -1


def test_clip_cov_never_draws_a_token_whose_ratio_is_nan() -> None:
    """A drawn token has a loss of 0, which would hide it."""
    batch = even()
    batch["old_logprobs"][0, 0] = math.nan
    uniform = torch.arange(6.0).view(1, 6) / 6
    ours = clip_cov(**batch, cov_ratio=0.34, cov_low=0.5, cov_high=9.0, uniform=uniform)
    assert ours.loss[0, 0].isnan() and not ours.metrics["drop_frac"].value[0, 0]


def even() -> Batch:
    """One row on-policy, whose tokens are all candidates but the middle ones of no covariance."""
    logprobs = torch.linspace(-4, -1, 6, dtype=torch.float64).unsqueeze(0)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs.clone(),
        "advantages": 2 * torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(0),
        "mask": torch.ones(1, 6, dtype=torch.bool),
    }


def draw(seed: int, share: float = 0.34) -> TokenLoss:
    generator = torch.Generator().manual_seed(seed)
    return clip_cov(**even(), cov_ratio=share, cov_low=0.5, cov_high=9.0, generator=generator)


def test_the_draw_is_the_generators_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draw(7).loss
    torch.manual_seed(1)
    assert torch.equal(first, draw(7).loss)
    torch.set_rng_state(before)
    draw(7)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.thorough
def test_every_candidate_is_drawn_as_often() -> None:
    """2 of 4 candidates without replacement: each in half of the draws, within 5 standard deviations."""
    times: Counter[int] = Counter()
    rounds = 400
    for seed in range(rounds):
        drawn = draw(seed).metrics["drop_frac"].value[0].nonzero().flatten().tolist()
        assert len(drawn) == 2
        times.update(drawn)
    assert sorted(times) == [0, 1, 4, 5]
    for count in times.values():
        assert abs(count - rounds / 2) < 5 * math.sqrt(rounds / 4)


def test_the_numbers_come_from_one_place() -> None:
    with pytest.raises(ValueError, match="pass generator"):
        clip_cov(**even())
    with pytest.raises(ValueError, match="not both"):
        clip_cov(**even(), generator=torch.Generator(), uniform=torch.zeros(1, 6))


def test_a_generator_passes_a_fake_tensor_mode() -> None:
    with FakeTensorMode() as fake:
        given = {name: fake.from_tensor(x) for name, x in even().items()}
        assert clip_cov(**given, generator=torch.Generator()).loss.shape == (1, 6)
