"""Importance ratios, in log space, by level: per token, or one per sequence.

log r_t = log pi(y_t) - log old(y_t), in nats. In PPO-like losses `old_logprobs` are those of the old
(proximal) policy, before this round of updates; in DPPO, of the rollout (behaviour) policy that sampled.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import (
    at_least_float32,
    at_most,
    below_overflow,
    bounded,
    keep,
    safe_exp,
)
from composer_plugins.kernels.types import Mask, Tokens


def log_ratio(
    logprobs: Tokens,
    old_logprobs: Tokens,
    mask: Mask,
    *,
    clamp: float | None = None,
) -> Tokens:
    """log pi(y_t) - log old(y_t) where `mask`, 0 elsewhere.

    `clamp=20.0` limits it to [-20, 20] nats, as verl does; the gradient is 0 beyond the clamp.
    `old_logprobs` carry no gradient, so that on-policy they may be `logprobs` themselves.
    """
    old = at_least_float32(old_logprobs).detach()
    difference = keep(at_least_float32(logprobs) - old, mask)
    return difference if clamp is None else bounded(difference, -clamp, clamp)


def importance_weight(
    logprobs: Tokens,
    old_logprobs: Tokens,
    *,
    clamp: float | None = None,
) -> Tokens:
    """pi(y_t) / old(y_t) as a weight, without a gradient; `clamp` as in `log_ratio`.

    Not masked: mask the product with it.
    """
    log_r = at_least_float32(logprobs).detach() - at_least_float32(old_logprobs).detach()
    return safe_exp(log_r if clamp is None else log_r.clamp(-clamp, clamp))


def sequence_log_ratio(token_log_ratio: Tokens, mask: Mask) -> Float[Tensor, "*batch 1"]:
    """GSPO's length-normalised ratio: log s = (1/|y|) sum_t log r_t, the geometric mean of the tokens'.

    `token_log_ratio` is 0 where masked, as `log_ratio` makes it.
    """
    return token_log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def with_token_gradient(
    log_value: Float[Tensor, "*batch #tokens"],
    logprobs: Tokens,
    *,
    cap: float | None = None,
) -> Tokens:
    """exp(sg(log s) + log pi(y_t) - sg(log pi(y_t))): s in value, s d log pi(y_t) in gradient.

    `cap` bounds log s, in nats. Where log s is beyond the cap, or exp() would overflow, the gradient is 0.
    """
    log_s = log_value.detach()
    limited = below_overflow(at_most(log_s, cap))
    value = limited.exp()
    slope = torch.where(limited < log_s, 0.0, value)  # of NaN it is NaN
    return value + slope * (logprobs - logprobs.detach())
