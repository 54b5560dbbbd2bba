"""Recorded policy losses: the inputs for a kernel, and the comparison of value and gradient."""

from torch import Tensor

from composer_plugins.testing.assertions import assert_loss_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case


def batch(case: Case, policy: str = "old_log_prob") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, those of the old (or the named) policy, advantages and mask."""
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    mask = golden.tensor(case["response_mask"]).bool()
    return logprobs, golden.tensor(case[policy]), golden.tensor(case["advantages"]), mask


def assert_equals(case: Case, loss: Tensor, token_loss: Tensor, logprobs: Tensor) -> None:
    """Assert that the reduced loss and its gradient in the log-probabilities are the recorded ones."""
    assert_loss_parity(
        loss,
        token_loss,
        logprobs,
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad_log_prob"]),
    )
