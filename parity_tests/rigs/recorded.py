"""Recorded policy losses: the inputs for a kernel, and comparisons with the results of verl and its forks."""

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_loss_parity, assert_parity
from parity_tests.rigs import dialects, golden
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


def assert_equals_verl(
    case: Case,
    ours: TokenLoss,
    logprobs: Tensor,
    *,
    lower: Tensor | None = None,
    clamp: float | None = 20.0,
) -> None:
    """Assert equality of the reduced loss, its gradient and the metrics of verl (`assert_verl_logs`)."""
    mask = golden.tensor(case["response_mask"]).bool()
    token_loss = ours.loss
    if case["rollout_is_weights"] is not None:
        token_loss = token_loss * golden.tensor(case["rollout_is_weights"])
    assert_equals(case, dialects.verl(token_loss, mask, case["loss_agg_mode"]), token_loss, logprobs)
    nowhere = torch.zeros_like(mask)
    clipped = (
        metric.value.bool() for name, metric in ours.metrics.items() if name.endswith(("_low", "_high"))
    )
    beyond = sum(clipped, nowhere)
    assert_verl_logs(case, beyond, nowhere if lower is None else lower, clamp)


def assert_verl_logs(case: Case, clipped: Tensor, lower: Tensor, clamp: float | None) -> None:
    """The fraction of tokens clipped, that of verl's second bound (0 where there is none), and the drift.

    The drift is the mean of log old - log pi, which verl clamps for most of its losses. Its masked mean
    divides by n + 1e-8.
    """
    old, logprobs = (golden.tensor(case[name]) for name in ("old_log_prob", "log_prob"))
    mask = golden.tensor(case["response_mask"]).bool()
    drift = -log_ratio(logprobs, old, mask, clamp=clamp)
    ours = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": lower, "actor/ppo_kl": drift}
    n = mask.sum().double()
    for name, recorded in case["metrics"].items():
        value = ours[name].double()
        mean = aggregate(value, mask, "token-mean") * (n / (n + dialects.VERL_LENGTH_EPS))
        largest = max(1.0, float(value.abs().max()))
        assert_parity(mean, golden.tensor(recorded), terms=mask.numel(), magnitude=largest, what=name)
