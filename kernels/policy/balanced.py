"""PPO's clip with a range that is found anew for each batch. Shapes and units: `parts.py`.

The range is that of the tensors passed: a batch that is cut in two is two batches here.
"""

from collections.abc import Iterator
from typing import Literal

import torch

from composer_plugins.kernels.masking import keep, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages, token_advantages
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["bapo", "m2po"]

First = Literal["high", "low"]


def bapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    ratio_low: float = 0.6,
    ratio_low_max: float = 0.9,
    ratio_high: float = 1.2,
    ratio_high_max: float = 3.0,
    step_low: float = 0.05,
    step_high: float = 0.05,
    share: float = 0.5,
    first: First = "high",
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """BAPO: the clip is widened until tokens with A > 0 have their share of the loss.

        x_t = max(-A r_t, -A clip(r_t, c_low, c_high)),   r_t = pi(y_t) / old(y_t)
        c_low, c_high: the first of the list whose G+ >= share (G+ + G-), or else the last
        G+ = sum_t A min(r_t, c_high) where A > 0,   G- = sum_t |A| max(r_t, c_low) where A < 0

    The list begins with (ratio_low, ratio_high). It raises c_high by step_high up to ratio_high_max, then
    c_low by step_low up to ratio_low_max, or with first "low" in the other order. The sums are over the
    tensors passed. Denominator: "token-mean".
    Departs from the authors' code: (1) it compares G+ / (G- + 1e-8) with a target, ours G+ with a product.
    Raises ValueError for an unknown `first`.
    Source: arXiv 2510.18927 eq. 8 and algorithm 1; WooooDyy/BAPO recipe/bapo/policy_loss.py@7287044, which
    raises c_low first. The ranges are those of the paper.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask, clamp=log_ratio_clamp)
    ratio = safe_exp(log_r)
    r, each = ratio.detach(), token_advantages(advantages, mask)
    lows = tuple(_raised(ratio_low, ratio_low_max, step_low))
    highs = tuple(_raised(ratio_high, ratio_high_max, step_high))
    if first == "high":
        bounds = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    elif first == "low":
        bounds = [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]
    else:
        raise ValueError(f"unknown first {first!r}; known: {', '.join(First.__args__)}")
    c_low, c_high = (r.new_full((), bound) for bound in bounds[-1])
    for low, high in reversed(bounds[:-1]):  # so that the first one that is balanced stays
        positive = (each.clamp(min=0) * r.clamp(max=high)).sum()
        negative = (-each.clamp(max=0) * r.clamp(min=low)).sum()
        balanced = (1 - share) * positive >= share * negative
        c_low, c_high = torch.where(balanced, low, c_low), torch.where(balanced, high, c_high)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(c_low, c_high))
    if dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
    return TokenLoss(keep(loss, mask), _metrics(r, mask, a, c_low, c_high))


def m2po(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    budget: float = 0.04,
    least_low: float = 0.0,
    least_high: float = 0.0,
) -> TokenLoss:
    """M2PO: the clip is as wide as a budget of the second moment of the log ratio allows.

        x_t = max(-A r_t, -A clip(r_t, min(e^-tau, 1 - least_low), max(e^tau, 1 + least_high)))
        tau = the largest |log r_t| such that mean_u min((log r_u)^2, tau^2) < budget

    The mean and the maximum are over the tokens that an update has moved on: A > 0 and r_t > 1, or A < 0 and
    r_t < 1. Where the mean of (log r_t)^2 is within the budget, nothing is clipped. It is a statistic of the
    tensors passed. Denominator: "token-mean".
    Departs from the authors: (1) their tau^2 is less by 1e-12; (2) where not one token is within the budget,
    their function fails, and ours clips at 1; (3) their bounds are float32, so that the token of tau
    itself may be clipped.
    Source: arXiv 2510.01161; Infini-AI-Lab/M2PO verl/trainer/ppo/core_algos.py@af54a3e
    compute_m2po_policy_loss; its scripts: M2_budget=0.04.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    ratio = safe_exp(log_r)
    moved = mask & (log_r.detach() * a > 0)
    moment = torch.where(moved, log_r.detach().square(), torch.inf).flatten().sort().values
    counts = moment < torch.inf
    moment = torch.where(counts, moment, 0.0)
    n = counts.sum()
    above = n - counts.cumsum(0)  # tokens with a larger moment
    capped = moment.cumsum(0) + moment * above
    within = torch.where(counts & (capped < budget * n), moment, 0.0)
    tau = torch.cat([within, within.new_zeros(1)]).amax().sqrt()
    tau = torch.where(moment.sum() <= budget * n, torch.inf, tau)
    low = torch.minimum((-tau).exp(), torch.full_like(tau, 1 - least_low))
    high = torch.maximum(safe_exp(tau), torch.full_like(tau, 1 + least_high))
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    return TokenLoss(keep(loss, mask), _metrics(ratio.detach(), mask, a, low, high))


def _raised(start: float, most: float, step: float) -> Iterator[float]:
    """Yield start, start + step ... up to `most`, and `most` itself."""
    yield start
    while start < most and step > 0:
        start = min(start + step, most)
        yield start


def _metrics(
    ratio: Tokens, mask: Mask, advantages: Advantages, low: torch.Tensor, high: torch.Tensor
) -> dict[str, Metric]:
    return {
        **clip_metrics(ratio, mask, low, high, advantages),
        "clip_low": Metric(low.expand(mask.shape), mask),
        "clip_high": Metric(high.expand(mask.shape), mask),
    }
