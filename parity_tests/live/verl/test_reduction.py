"""Reductions, KL and rollout corrections of the installed verl: where no claim is, or where ours differ."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import agg_loss

from composer_plugins.conformance.batches import FLOAT64, global_batch, policy_batch
from composer_plugins.conformance.reductions import kernel as row_kernel
from composer_plugins.frameworks.verl import MODES
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import drawn_by
from parity_tests.rigs import dialects


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50)
@given(data=st.data())
def test_aggregate_equals_agg_loss_of_a_float64_mask(mode: str, data: st.DataObject) -> None:
    """The length of a row is then n + 1e-8."""
    batch = data.draw(drawn_by(policy_batch))
    token_loss = (batch.logprobs * batch.advantages).requires_grad_()
    info = data.draw(drawn_by(global_batch, batch.mask))
    theirs = agg_loss(token_loss, batch.mask.to(FLOAT64), mode, **info)
    ours = dialects.verl(token_loss, batch.mask, mode, **info)
    gradient, wanted = (torch.autograd.grad(x, token_loss)[0] for x in (ours, theirs))
    largest = float((gradient * token_loss.detach()).abs().max())
    assert_parity(ours, theirs, terms=token_loss.numel(), magnitude=largest)
    assert_parity(gradient, wanted, terms=1)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "token-sum"])
def test_a_batch_without_an_unmasked_token_is_nan_in_verl_and_zero_here(mode: str) -> None:
    token_loss = torch.ones(2, 3, dtype=FLOAT64, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert agg_loss(token_loss, nothing.long(), mode).isnan()
    ours = aggregate(token_loss, nothing, mode, max_length=3)
    assert ours == 0 and not torch.autograd.grad(ours, token_loss)[0].any()


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


def test_verl_clamps_a_token_before_it_rejects_a_row_and_ours_clamps_the_row() -> None:
    d = torch.tensor([[25.0, -25.5]], dtype=FLOAT64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(d, mask.long(), "seq_sum_k1", "0.9_1.1")
    ours = row_kernel("correction", "mis", low=1 / 1.1, high=1 / 0.9, log_ratio_clamp=20.0)
    assert theirs.all() and not ours(d, torch.zeros_like(d), mask).any()
