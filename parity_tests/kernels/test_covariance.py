"""Clip-Cov and KL-Cov against loops over tokens; how their draw behaves; where a generator can be traced."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_plugins.conformance import reductions
from composer_plugins.kernels.policy import clip_cov, kl_cov
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches

Batch = dict[str, Tensor]
few = settings(max_examples=40)
shares = st.sampled_from([2e-4, 0.1, 0.5, 1.0])


def tokens(batch: Batch) -> list[tuple[tuple[int, int], float, float, float]]:
    """The unmasked tokens in order: where, log-probability, log ratio, advantage."""
    advantages = batch["advantages"].expand(batch["mask"].shape)
    return [
        (i, lp, lp - float(batch["old_logprobs"][i]), float(advantages[i]))
        for i in map(tuple, batch["mask"].nonzero().tolist())
        for lp in [float(batch["logprobs"][i])]
    ]


def covariances(unmasked: list[tuple[tuple[int, int], float, float, float]]) -> list[float]:
    n = max(len(unmasked), 1)
    mean_a, mean_lp = math.fsum(t[3] for t in unmasked) / n, math.fsum(t[1] for t in unmasked) / n
    return [(a - mean_a) * (lp - mean_lp) for _, lp, _, a in unmasked]


def clip_cov_loop(
    batch: Batch, uniform: Tensor, clip: float, share: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Loss and slope of each token; of the candidates, those with the smallest numbers are drawn."""
    unmasked, candidates = tokens(batch), []
    wanted, slopes = torch.zeros_like(batch["logprobs"]), torch.zeros_like(batch["logprobs"])
    for (i, _, lr, a), cov in zip(unmasked, covariances(unmasked), strict=True):
        free, bounded = -a * math.exp(lr), -a * min(max(math.exp(lr), 1 - clip), 1 + clip)
        wanted[i], slopes[i] = max(free, bounded), 0.0 if bounded > free else free
        if low < cov < high and not bounded > free:
            candidates.append((float(uniform[i]), i))
    for _, i in sorted(candidates)[: max(int(share * len(unmasked)), 1)]:
        wanted[i] = slopes[i] = 0.0
    return wanted, slopes


def spread(batch: Batch) -> Batch:
    """The same batch with an advantage per token, so that covariances are of both signs and distinct."""
    noise = torch.linspace(-3, 3, batch["mask"].numel(), dtype=torch.float64).view(batch["mask"].shape)
    return batch | {"advantages": batch["advantages"] + noise}


@few
@given(batch=token_batches(), share=shares, seed=st.integers(0, 99))
def test_clip_cov_is_what_a_loop_over_tokens_makes_of_it(batch: Batch, share: float, seed: int) -> None:
    batch = spread(batch)
    uniform = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(seed))
    uniform = uniform.to(torch.float64)
    kernel = reductions.kernel("policy", "clip_cov@verl")
    bounds = {"clip": 0.2, "share": share, "low": 0.1, "high": 2.0}
    wanted, slopes = clip_cov_loop(batch, uniform, **bounds)
    logprobs = batch["logprobs"].requires_grad_()
    ours = kernel(**batch, uniform=uniform, cov_ratio=share, cov_low=0.1, cov_high=2.0)
    assert_parity(ours.loss, wanted, terms=batch["mask"].numel())
    (gradient,) = torch.autograd.grad(ours.loss.sum(), logprobs)
    assert_parity(gradient, slopes, terms=batch["mask"].numel(), what="gradient")


@few
@given(batch=token_batches(), share=shares)
def test_kl_cov_is_what_a_loop_over_tokens_makes_of_it(batch: Batch, share: float) -> None:
    batch = spread(batch)
    unmasked, wanted = tokens(batch), torch.zeros_like(batch["logprobs"])
    by_covariance = sorted(zip(covariances(unmasked), unmasked, strict=True), key=lambda t: -t[0])
    held = {t[1][0] for t in by_covariance[: max(int(share * len(unmasked)), 1)]}
    for i, _, lr, a in unmasked:
        wanted[i] = -a * math.exp(lr) + (0.1 * abs(lr) if i in held else 0.0)
    ours = reductions.kernel("policy", "kl_cov@verl")(**batch, cov_ratio=share)
    assert_parity(ours.loss, wanted, terms=batch["mask"].numel())


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


def even(n: int = 6) -> Batch:
    """One row on-policy, whose tokens are all candidates but the middle ones of no covariance."""
    logprobs = torch.linspace(-4, -1, n, dtype=torch.float64).unsqueeze(0)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs.clone(),
        "advantages": 2 * torch.linspace(-1, 1, n, dtype=torch.float64).unsqueeze(0),
        "mask": torch.ones(1, n, dtype=torch.bool),
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
