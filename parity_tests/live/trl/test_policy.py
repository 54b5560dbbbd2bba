"""Policy losses next to the installed GRPOTrainer: a live one, and where the two differ on purpose."""

import math

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims.grpo_options import Options
from composer_plugins.conformance.trl_claims.policy import ROWS, Batch, reduced, token_loss, trl_loss
from composer_plugins.kernels import policy
from composer_plugins.testing.assertions import assert_parity


def single(**changes: float) -> Batch:
    """Two tokens of one row; `changes` are the second one's."""
    ones = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    values = {name: ones.clone() for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    for name, value in changes.items():
        values[name][0, 1] = value
    values["logprobs"].requires_grad_()
    more = {"entropies": ones + 2, "weights": ones + 2, "advantages": -ones[:, :1], "mask": ones < 0}
    return {**values, **more, "on_policy": torch.tensor(False)}


def test_vespo_of_a_vanishing_ratio_differs_in_trl() -> None:
    """TRL holds w above 1e-8, ours w^k only: exp(-lambda w) is 2e-8 apart."""
    batch = single(old_logprobs=18.9)
    o = Options(loss_type="vespo", vespo_k_pos=0.1)
    ours = reduced(token_loss(batch, o), batch["mask"], o)
    theirs = trl_loss(batch, o)
    ratio = float((ours / theirs).detach())
    assert ratio != pytest.approx(1.0, abs=1e-9)
    assert ratio == pytest.approx(1.0, abs=1e-7)


def test_a_rollouts_missing_log_probability_is_no_drift_in_trl_and_nan_here() -> None:
    batch = single(rollout_logprobs=math.nan)
    batch["advantages"] = -batch["advantages"]
    theirs = trl_loss(batch, Options(off_policy_mask_threshold=0.5))
    assert theirs.isfinite()
    ours = kernel("policy", "opsm@trl")(
        *(batch[n] for n in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"))
    )
    assert ours.loss.isnan().all()


def test_a_masked_nan_is_a_nan_loss_in_trl_and_nothing_here() -> None:
    batch = single(old_logprobs=math.nan)
    batch["mask"] = torch.tensor([[True, False]])
    for loss_type, level in ROWS:
        o = Options(loss_type=loss_type, importance_sampling_level=level)
        ours = token_loss(batch, o)
        assert bool(ours[0, 0].isfinite()) and bool(ours[0, 0] != 0)
        theirs = trl_loss(batch, o)
        # VESPO's weight of the whole sequence is then 0.
        assert theirs == 0 if loss_type == "vespo" else theirs.isnan()


def test_an_overflowing_ratio_is_a_nan_gradient_in_trl_and_not_here() -> None:
    batch = single(old_logprobs=-1000.0)
    theirs, ours = trl_loss(batch, Options()), token_loss(batch, Options()).sum()
    assert torch.autograd.grad(theirs, batch["logprobs"])[0].isnan().any()
    assert torch.autograd.grad(ours, batch["logprobs"])[0].isfinite().all()


MASK = torch.tensor([[True, True, False], [True, False, False]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.0, -2.0]], dtype=torch.float64)
LOGPROBS = OLD + torch.tensor([[0.2, -0.4, 0.0], [-0.6, 0.0, 0.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)


def theirs(log_ratio: Tensor, weights: Tensor | None) -> Tensor:
    phi = GRPOTrainer.get_gamma_weights(ADVANTAGES, log_ratio, MASK, weights)
    return torch.where(MASK, -phi * ADVANTAGES * LOGPROBS, 0.0)


def ours(logprobs: Tensor, weights: Tensor | None) -> Tensor:
    logs = None if weights is None else weights.log()
    return policy.vespo(logprobs, OLD, ADVANTAGES, MASK, log_weights=logs).loss


def test_trl_multiplies_corrections_of_masked_tokens_into_vespos_weight_and_we_do_not() -> None:
    weights = torch.tensor([[0.9, 1.2, 1.0], [1.1, 1.0, 1.0]], dtype=torch.float64)
    ratio = LOGPROBS - OLD
    assert_parity(ours(LOGPROBS, None), theirs(ratio, None), terms=3)
    assert_parity(ours(LOGPROBS, weights), theirs(ratio, weights), terms=3)
    weights[0, 2] = 0.5
    assert_parity(ours(LOGPROBS, weights)[1], theirs(ratio, weights)[1], terms=3)
    difference = (ours(LOGPROBS, weights) - theirs(ratio, weights))[0].abs()
    assert (difference[:2] > 0.01).all()


def test_a_ratio_that_is_not_a_number_is_no_loss_in_trl_and_nan_here() -> None:
    ratio = LOGPROBS - OLD
    ratio[0, 0] = torch.nan
    assert not theirs(ratio, None)[0].any()
    old = torch.where(ratio.isnan(), torch.nan, OLD)
    found = policy.vespo(LOGPROBS, old, ADVANTAGES, MASK).loss
    assert found[0, :2].isnan().all() and found[1].isfinite().all()
