"""verl's aggregation, KL estimators and rollout corrections against ours, on drawn batches."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import agg_loss, compute_rewards, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
from verl.workers.config.actor import RolloutCorrectionConfig

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.kl import subtract_kl
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from parity_tests.support import dialects
from parity_tests.support.verl_facts import (
    FLOAT64,
    MODES,
    Batch,
    actor,
    assert_policy_parity,
    global_batches,
    policy_batches,
    reduced,
    row_kernel,
    verl_policy_loss,
    with_dialect,
)

examples = settings(max_examples=50)

# Of a row's statistic, bounds on either side; those of one side have no kernel here.
REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
NO_KERNEL = dict.fromkeys(
    (f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")),
    "no kernel: a row or token is left out by an estimate of the KL, not by its weight",
)


@pytest.mark.parametrize("mode", MODES)
@examples
@given(data=st.data(), dtype=st.sampled_from([torch.int64, FLOAT64]))
def test_aggregate_equals_agg_loss(mode: str, data: st.DataObject, dtype: torch.dtype) -> None:
    batch = data.draw(policy_batches())
    token_loss = (batch.logprobs * batch.advantages).requires_grad_()
    info = data.draw(global_batches(batch.mask))
    theirs = agg_loss(token_loss, batch.mask.to(dtype), mode, **info)
    (gradient,) = torch.autograd.grad(theirs, token_loss)
    junk = with_junk(token_loss.detach(), batch.mask).requires_grad_()
    if dtype == FLOAT64:  # where a row's length is n + 1e-8
        ours = dialects.verl(junk, batch.mask, mode, **info)
    else:
        ours = reduced(junk, batch.mask, mode, info)
    (our_gradient,) = torch.autograd.grad(ours, junk)
    largest = float((our_gradient * token_loss.detach()).abs().max())
    assert_parity(ours, theirs, terms=token_loss.numel(), magnitude=largest)
    assert_parity(our_gradient, gradient, terms=1)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "token-sum"])
def test_a_batch_without_an_unmasked_token_is_nan_in_verl_and_zero_here(mode: str) -> None:
    token_loss = torch.ones(2, 3, dtype=FLOAT64, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert agg_loss(token_loss, nothing.long(), mode).isnan()
    ours = aggregate(token_loss, nothing, mode, max_length=3)
    assert ours == 0 and not torch.autograd.grad(ours, token_loss)[0].any()


def test_verl_adds_1e_8_to_a_row_length_only_where_its_mask_is_float64() -> None:
    token_loss = torch.rand(4, 3, generator=torch.Generator().manual_seed(1), dtype=FLOAT64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    ours = float(aggregate(token_loss, mask.bool(), "seq-mean-token-mean"))

    def theirs(dtype: torch.dtype) -> float:
        return float(agg_loss(token_loss, mask.to(dtype), "seq-mean-token-mean"))

    assert theirs(torch.int64) == pytest.approx(ours, rel=1e-15)
    assert 1e-9 < abs(theirs(FLOAT64) / ours - 1) < 1e-8, "drop VERL_LENGTH_EPS from dialects.verl"


ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1@verl"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), "k2@verl"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3@verl"),
    **dict.fromkeys(("kl+", "k1+"), "k1_plus@verl"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3_plus@verl"),
    "abs": "abs@verl",
}


@pytest.mark.parametrize("name", ESTIMATORS)
@examples
@given(batch=policy_batches())
def test_estimator_equals_kl_penalty(name: str, batch: Batch) -> None:
    x = batch.logprobs.clone().requires_grad_()
    theirs = torch.where(batch.mask, kl_penalty(x, batch.old_logprobs, name), 0.0)
    (gradient,) = torch.autograd.grad(theirs.sum(), x)
    theirs = theirs.detach()
    junk = with_junk(batch.logprobs, batch.mask).requires_grad_()
    reference = with_junk(batch.old_logprobs, batch.mask)
    ours = row_kernel("kl", ESTIMATORS[name])(junk, reference, batch.mask)
    (our_gradient,) = torch.autograd.grad(ours.sum(), junk)
    # Of k3 the terms are exp(-d), d and 1: where d is small it is their difference that is left.
    largest = max(1.0, float(theirs.abs().max()), float(gradient.abs().max()))
    assert_parity(ours, theirs, terms=3, magnitude=largest)
    assert_parity(our_gradient, gradient, terms=3, magnitude=largest, what="gradient")


def test_kl_penalty_knows_no_other_estimator() -> None:
    x = torch.zeros(1, dtype=FLOAT64)
    for name in ("full", "k4", ""):
        with pytest.raises(NotImplementedError):
            kl_penalty(x, x, name)


@examples
@given(batch=policy_batches(), weight=st.sampled_from([0.0, 0.001, 1.0]))
def test_subtract_kl_equals_compute_rewards(batch: Batch, weight: float) -> None:
    theirs = compute_rewards(batch.advantages, batch.logprobs, batch.old_logprobs, weight)
    inputs = (with_junk(x, batch.mask) for x in (batch.advantages, batch.logprobs, batch.old_logprobs))
    ours = subtract_kl(*inputs, batch.mask, kl_weight=weight)
    largest = max(float(x.abs().max()) for x in batch[:3])
    assert_parity(ours, torch.where(batch.mask, theirs, 0.0), terms=2, magnitude=largest)


LEVELS = st.sampled_from(["token", "sequence"])
BOUNDS = st.sampled_from([None, (2.0,), (1.1,), (10.0,), (0.5, 5.0), (0.9, 1.1), (0.01, 2.0)])


def weights(batch: Batch, level: str, bounds: tuple[float, ...] | None, normalise: bool) -> Tensor:
    """Our correction: one bound caps, two mask; None is each side's own default."""
    inputs = with_junk(batch.logprobs, batch.mask), with_junk(batch.old_logprobs, batch.mask), batch.mask
    if bounds is not None and len(bounds) == 2:
        low, high = bounds
        if level == "token":
            return row_kernel("correction", "icepop@verl", low=low, high=high, normalise=normalise)(*inputs)
        params = {"low": low, "high": high, "level": level, "log_ratio_clamp": 20.0}
        return row_kernel("correction", "mis", normalise=normalise, **params)(*inputs)
    cap = {} if bounds is None else {"cap": bounds[0]}
    return row_kernel("correction", "tis@verl", level=level, normalise=normalise, **cap)(*inputs)


@examples
@given(batch=policy_batches(), level=LEVELS, bounds=BOUNDS, normalise=st.booleans())
def test_correction_weights_equal_verl(
    batch: Batch, level: str, bounds: tuple[float, ...] | None, normalise: bool
) -> None:
    ours = weights(batch, level, bounds, normalise)
    assume(ours.any())  # verl raises: below
    assume(
        not normalise or float(mean_weight(weights(batch, level, bounds, False), batch.mask, level)) > 1e-8
    )
    option = {} if bounds is None else {"rollout_is_threshold": "_".join(map(str, bounds))}
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
        batch.logprobs - batch.old_logprobs,
        batch.mask.long(),
        rollout_is=level,
        rollout_is_batch_normalize=normalise,
        **option,
    )
    # A sum of log ratios is as precise as its largest, and exp hands that on.
    largest = max(1.0, float((batch.logprobs - batch.old_logprobs).abs().max()))
    assert_parity(ours, theirs, terms=batch.mask.numel(), magnitude=largest * max(1.0, float(theirs.max())))


def mean_weight(w: Tensor, mask: Tensor, level: str) -> Tensor:
    """By what verl normalises, if it is above 1e-8: the mean over tokens, or over rows."""
    mode = "token-mean" if level == "token" else "seq-mean-token-mean"
    return aggregate(w, mask, mode)


def test_verl_does_not_normalise_by_a_mean_below_1e_8_and_we_do() -> None:
    d, mask = torch.full((1, 2), -20.0, dtype=FLOAT64), torch.ones(1, 2, dtype=torch.bool)
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
        d, mask.long(), "token", rollout_is_batch_normalize=True
    )
    ours = row_kernel("correction", "tis@verl", normalise=True)(d, torch.zeros_like(d), mask)
    assert float(theirs.max()) < 1e-8 and ours.tolist() == [[1.0, 1.0]]


def test_where_every_weight_is_masked_verl_divides_by_zero_and_ours_are_zero() -> None:
    d, mask = torch.ones(1, 2, dtype=FLOAT64), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ZeroDivisionError):
        rollout_corr_helper.compute_rollout_correction_weights(d, mask.long(), "token", "0.9_1.1")
    ours = row_kernel("correction", "icepop@verl", low=0.9, high=1.1)(d, torch.zeros_like(d), mask)
    assert not ours.any()


def kept(batch: Batch, option: str, low: float, high: float) -> Tensor:
    """verl bounds -log w between the logarithms of its thresholds: w lies between their inverses.

    It clamps each log ratio at 20 nats before it sums them, ours the sum: here they are clamped before.
    """
    clamped = (batch.logprobs - batch.old_logprobs).clamp(-20, 20)
    inputs = with_junk(clamped, batch.mask), torch.zeros_like(clamped), batch.mask
    params = {"low": 1 / high, "high": 1 / low, "level": REJECTIONS[option]}
    return row_kernel("correction", "mis", **params)(*inputs) > 0


@pytest.mark.parametrize("option", REJECTIONS)
@examples
@given(batch=policy_batches(), bounds=st.sampled_from([(0.5, 2.0), (0.999, 1.001), (0.9, 5.0)]))
def test_masked_correction_rejects_what_verl_rejects(
    option: str, batch: Batch, bounds: tuple[float, float]
) -> None:
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        batch.logprobs - batch.old_logprobs, batch.mask.long(), option, "_".join(map(str, bounds))
    )
    assert torch.equal(kept(batch, option, *bounds), theirs.bool())


def test_verl_clamps_a_token_before_it_rejects_a_row_and_ours_clamps_the_row() -> None:
    d = torch.tensor([[25.0, -25.5]], dtype=FLOAT64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(d, mask.long(), "seq_sum_k1", "0.9_1.1")
    ours = row_kernel("correction", "mis", low=1 / 1.1, high=1 / 0.9, log_ratio_clamp=20.0)
    assert theirs.all() and not ours(d, torch.zeros_like(d), mask).any()


def test_every_rejection_of_verl_is_compared_or_has_a_reason() -> None:
    # Of the maximum over a row there is no k1.
    assert set(SUPPORTED_ROLLOUT_RS_OPTIONS) == {*REJECTIONS, *NO_KERNEL}


@examples
@given(data=st.data())
def test_reinforce_with_a_correction_equals_verl_in_bypass_mode(data: st.DataObject) -> None:
    batch = data.draw(policy_batches())._replace(weights=None)
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    level, bounds, normalise = data.draw(LEVELS), data.draw(BOUNDS), data.draw(st.booleans())
    option = data.draw(st.sampled_from([None, *REJECTIONS]), label="rejection")
    correction = RolloutCorrectionConfig(
        loss_type="reinforce",
        rollout_is=level,
        rollout_is_threshold="_".join(map(str, bounds or (2.0,))),
        rollout_is_batch_normalize=normalise,
        rollout_rs=option,
        rollout_rs_threshold="0.5_2.0",
    )
    w = weights(batch, level, bounds, normalise)
    left = batch.mask if option is None else kept(batch, option, 0.5, 2.0)
    assume(left.any() and w.any())
    assume(
        not normalise or float(mean_weight(weights(batch, level, bounds, False), batch.mask, level)) > 1e-8
    )
    config = actor(info, rollout_correction=correction)
    loss, gradient, _ = verl_policy_loss("bypass_mode", batch, config, mode)
    reinforce = row_kernel("policy", "reinforce")

    def kernel(logprobs: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return corrected(reinforce(logprobs, advantages, mask), w, mask)

    assert_policy_parity(kernel, batch._replace(mask=left), (loss, gradient), mode, info)


@examples
@given(data=st.data())
def test_grpo_equals_verl_in_bypass_mode_by_default(data: st.DataObject) -> None:
    batch = data.draw(policy_batches())._replace(weights=None)
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    option = data.draw(st.sampled_from([None, *REJECTIONS]), label="rejection")
    left = batch.mask if option is None else kept(batch, option, 0.5, 2.0)
    assume(left.any())
    correction = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold="0.5_2.0")
    config = actor(info, rollout_correction=correction)
    loss, gradient, _ = verl_policy_loss("bypass_mode", batch, config, mode)
    # The old policy is the rollout's, and PPO's ratio the correction.
    kernel = row_kernel("policy", "grpo@verl")
    assert_policy_parity(kernel, batch._replace(mask=left), (loss, gradient), mode, info)


def test_every_row_with_a_dialect_of_verl_is_called_here() -> None:
    assert {f"{loss.name}@verl" for loss in with_dialect("kl")} == set(ESTIMATORS.values())
    assert {loss.name for loss in with_dialect("correction")} == {"tis", "icepop"}
    assert {loss.name for loss in with_dialect("aggregation")} == set(MODES)
