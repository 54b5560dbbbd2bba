"""Recorded policy losses as inputs of a kernel, and what the recordings of verl and its forks say of it."""

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.contract import TokenLoss
from parity_tests import dialects, golden
from parity_tests.assertions import assert_loss_parity, assert_parity
from parity_tests.golden import Case


def batch(case: Case, anchor: str = "old_log_prob") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, the policy they are compared with, advantages, mask."""
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    mask = golden.tensor(case["response_mask"]).bool()
    return logprobs, golden.tensor(case[anchor]), golden.tensor(case["advantages"]), mask


def assert_equals(case: Case, loss: Tensor, token_loss: Tensor, logprobs: Tensor) -> None:
    """The reduced loss and its gradient in the log-probabilities are the recorded ones."""
    assert_loss_parity(
        loss,
        token_loss,
        logprobs,
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad_log_prob"]),
    )


def assert_equals_verl(case: Case, ours: TokenLoss, logprobs: Tensor, *clipped: str) -> None:
    """The reduced loss, its gradient, and the fraction of tokens that verl logs as clipped."""
    mask = golden.tensor(case["response_mask"]).bool()
    token_loss = ours.loss
    if case["rollout_is_weights"] is not None:
        token_loss = token_loss * golden.tensor(case["rollout_is_weights"])
    assert_equals(case, dialects.verl(token_loss, mask, case["loss_agg_mode"]), token_loss, logprobs)
    if clipped:
        fraction = sum(aggregate(ours.metrics[name].value.double(), mask, "token-mean") for name in clipped)
        recorded = torch.tensor(case["metrics"]["actor/pg_clipfrac"])
        assert_parity(fraction, recorded, terms=1, dtype=torch.float32, magnitude=1.0)
