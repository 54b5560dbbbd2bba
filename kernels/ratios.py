"""Importance ratios, in log space, by level: per token, or one per sequence.

log r_t = log pi(y_t) - log anchor(y_t), in nats. The anchor is the *old* (proximal) policy of the last
optimizer step in PPO-like losses, and the *rollout* (behaviour) policy of the inference engine in DPPO.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep, masked_mean


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


def sequence_log_ratio(
    token_log_ratio: Float[Tensor, "*batch tokens"], mask: Bool[Tensor, "*batch tokens"]
) -> Float[Tensor, "*batch 1"]:
    """GSPO's length-normalised ratio: log s = (1/|y|) sum_t log r_t, the geometric mean of the tokens'."""
    return masked_mean(token_log_ratio, mask, keepdim=True)


def token_gradient(
    log_value: Float[Tensor, "*batch #tokens"], logprobs: Float[Tensor, "*batch tokens"]
) -> Float[Tensor, "*batch tokens"]:
    """`log_value` in value, d logprobs_t in gradient: sg(log s) + log pi(y_t) - sg(log pi(y_t))."""
    return log_value.detach() + (logprobs - logprobs.detach())
