"""Trust regions and off-policy masks against loops over tokens; probabilities of 0, of 1 and on a border."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from composer_plugins.kernels import policy
from composer_plugins.kernels.policy.masked import off_policy_sequence_mask
from composer_plugins.kernels.trust_regions import binary_kl, distance_mask, ratio_mask, tv_mask
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches


def assert_is(ours: Tensor, wanted: Tensor) -> None:
    assert_parity(ours, wanted, terms=4)


def test_a_rollout_whose_top_k_is_impossible_has_a_finite_distance() -> None:
    lp, top = one(-1.0), one(-1.0, -1.0).unsqueeze(0)
    for kernel in (policy.dppo_topk_tv, policy.dppo_topk_kl):
        assert kernel(lp, lp, one(1.0), lp < 0, top, torch.full_like(top, -math.inf)).loss.isfinite().all()


@settings(max_examples=30)
@given(batch=token_batches())
def test_score_centering_is_what_a_loop_over_tokens_and_entries_makes_of_it(batch: dict[str, Tensor]) -> None:
    """Three entries and a padded one; their coefficients are the gradient in their log-probabilities."""
    at = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    p, q = (
        torch.nn.functional.pad((2 * x.unsqueeze(-1) * at).sin().log_softmax(-1), (0, 1), value=fill)
        for x, fill in ((batch["logprobs"], 0.0), (batch["old_logprobs"] + 0.4, -math.inf))
    )
    logprobs, old, advantages, mask = (
        batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")
    )
    given = {"tv_low": 0.02, "tv_high": 0.05, "ratio_cap": 1.1, "adv_tau": 0.7}
    slopes, values = torch.zeros_like(p), torch.zeros_like(logprobs)
    for i in map(tuple, mask.nonzero().tolist()):
        a = 0.7 * float(advantages[i[0], 0])
        for v in range(3):
            log_p, log_q = float(p[i][v]), float(q[i][v])
            if -0.02 <= math.exp(log_p) - math.exp(log_q) <= 0.05:
                slopes[i][v] = a * math.exp(log_q) * min(math.exp(log_p - log_q), 1.1)
            values[i] += float(slopes[i][v]) * log_p
        log_p, log_q = float(logprobs[i]), float(old[i])
        inside = -0.02 <= math.exp(log_p) - math.exp(log_q) <= 0.05
        values[i] -= inside * a * min(math.exp(log_p - log_q), 1.1)

    p.requires_grad_()
    ours = policy.ipo_centered(logprobs, old, advantages, mask, p, q, **given).loss
    assert_is(ours, values)
    assert_is(torch.autograd.grad(ours.sum(), p)[0], slopes)


def one(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_a_binary_kl_from_what_the_sampler_thought_impossible_is_small_where_the_policy_does_too() -> None:
    """q = 0: KL = -log(1 - p), as 0 log 0 = 0. Upstream's arithmetic gives NaN, which drops the token."""
    lp, never, mask = one(math.log(1e-3), math.log(0.5)), one(-math.inf, -math.inf), one(1.0, 1.0) > 0
    ours = policy.dppo_kl(lp, never, one(1.0), mask, ratio_cap=3.0)
    assert_is(ours.loss, one(-3 * math.log(1e-3), 0.0))  # a KL of 0.001 and one of 0.69
    assert torch.equal(ours.loss[:, :1], policy.dppo_tv(lp, never, one(1.0), mask, ratio_cap=3.0).loss[:, :1])
    assert ours.metrics["mask_frac_high"].value.tolist() == [[False, True]]
    p, q = lp.exp(), never.exp()
    written = q * (never - lp) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))  # verl 0.9.1
    assert written.isnan().all() and not (written <= 0.05).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_logprob_above_zero_by_rounding_counts_as_certain(dtype: torch.dtype, sign: float) -> None:
    mask, a = torch.ones(1, 1, dtype=torch.bool), one(sign).to(dtype)
    certain, above, likely, unlikely = (one(x).to(dtype) for x in (0.0, 1e-6, math.log(0.999), -1.0))
    for rollout_logprobs in (likely, unlikely, certain):
        ours, want = (policy.dppo_kl(x, rollout_logprobs, a, mask, form="ratio") for x in (above, certain))
        assert torch.allclose(ours.loss, want.loss, rtol=1e-5) and ours.loss.isfinite().all()
        back, want = (policy.dppo_kl(rollout_logprobs, x, a, mask, form="ratio") for x in (above, certain))
        assert torch.allclose(back.loss, want.loss, rtol=1e-5) and back.loss.isfinite().all()
    assert policy.dppo_kl(above, unlikely, a.abs(), mask).metrics["mask_frac_high"].value.all()
    assert binary_kl(unlikely, above).isfinite().all()


def test_a_token_on_the_border_of_a_region_is_inside_of_it() -> None:
    """Probabilities of a half and a quarter are exact, and so is how far they are apart."""
    half, quarter, up, down = one(0.5), one(0.25), one(1.0), one(-1.0)
    for at, inside in ((0.25, True), (0.25 - 1e-9, False)):
        assert tv_mask(half, quarter, up, low=0.0, high=at).item() is inside
        assert tv_mask(quarter, half, down, low=at, high=0.0).item() is inside
        assert distance_mask(quarter, half, quarter, up, low=0.0, high=at).item() is inside
        assert distance_mask(quarter, quarter, half, down, low=at, high=0.0).item() is inside
        assert ratio_mask(1 + quarter, up, low=0.0, high=at).item() is inside
        assert ratio_mask(1 - quarter, down, low=at, high=0.0).item() is inside


def test_a_sequence_on_the_threshold_of_its_drift_is_kept() -> None:
    for threshold, kept in ((0.5, True), (0.5 - 1e-9, False)):
        assert off_policy_sequence_mask(one(0.5), one(-1.0), threshold=threshold).item() is kept


def test_masked_is_without_a_penalty_gives_nothing_to_a_token_its_sampler_thought_impossible() -> None:
    """A tau of 0 is no penalty, and not 0 times an infinite log ratio."""
    never, mask = one(-math.inf, -1.0), one(1.0, 1.0) > 0
    assert policy.masked_is(one(-1.0, -1.0), never, one(1.0), mask).loss.tolist() == [[0.0, 1.0]]
    kept = policy.masked_is(one(-1.0, -1.0), never, one(1.0), mask, token_high=math.inf, ratio_cap=3.0)
    assert kept.loss.tolist() == [[3.0, 1.0]]
    assert policy.masked_is(one(-1.0, -1.0), never, one(1.0), mask, kl_tau=0.1).loss.isnan()[0, 0]
