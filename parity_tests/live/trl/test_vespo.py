"""VESPO's weight against the installed TRL, where the two differ on purpose."""

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.kernels import policy
from composer_plugins.testing.assertions import assert_parity

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
