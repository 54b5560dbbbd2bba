"""Importance ratios, in log space, by level: per token, or one per sequence.

log r_t = log pi(y_t) - log anchor(y_t), in nats. The anchor is the *old* (proximal) policy of the last
optimizer step in PPO-like losses, and the *rollout* (behaviour) policy of the inference engine in DPPO.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, below_overflow, keep, safe_exp


def log_ratio(
    logprobs: Float[Tensor, "*batch tokens"],
    anchor_logprobs: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
    *,
    clamp: float | None = None,
) -> Float[Tensor, "*batch tokens"]:
    """log pi(y_t) - log anchor(y_t) where `mask`, 0 elsewhere.

    `clamp=20.0` limits it to [-20, 20] nats, as verl does; the gradient is 0 beyond the clamp. The
    anchor carries no gradient, so that on-policy it may be `logprobs` itself.
    """
    difference = keep(at_least_float32(logprobs) - at_least_float32(anchor_logprobs).detach(), mask)
    return difference if clamp is None else difference.clamp(-clamp, clamp)


def importance_weight(
    logprobs: Float[Tensor, "*batch tokens"],
    anchor_logprobs: Float[Tensor, "*batch tokens"],
    *,
    clamp: float | None = None,
) -> Float[Tensor, "*batch tokens"]:
    """pi(y_t) / anchor(y_t) as a weight, without a gradient; `clamp` as in `log_ratio`.

    Not masked: what stands at a masked token goes with it, once the weighted product is masked.
    """
    log_r = at_least_float32(logprobs).detach() - at_least_float32(anchor_logprobs).detach()
    return safe_exp(log_r if clamp is None else log_r.clamp(-clamp, clamp))


def sequence_log_ratio(
    token_log_ratio: Float[Tensor, "*batch tokens"], mask: Bool[Tensor, "*batch tokens"]
) -> Float[Tensor, "*batch 1"]:
    """GSPO's length-normalised ratio: log s = (1/|y|) sum_t log r_t, the geometric mean of the tokens'.

    `token_log_ratio` is 0 where masked, as `log_ratio` makes it.
    """
    return token_log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def with_token_gradient(
    log_value: Float[Tensor, "*batch #tokens"],
    logprobs: Float[Tensor, "*batch tokens"],
    *,
    cap: float | None = None,
) -> Float[Tensor, "*batch tokens"]:
    """exp(sg(log s) + log pi(y_t) - sg(log pi(y_t))): s in value, s d log pi(y_t) in gradient.

    `cap` bounds log s, in nats; where it does (or overflow would), the gradient is 0.
    """
    log_s = log_value.detach()
    bounded = below_overflow(log_s if cap is None else log_s.clamp(max=cap))
    value = bounded.exp()
    slope = torch.where(bounded == log_s, value, 0.0)
    return value + slope * (logprobs - logprobs.detach())
