"""Shared by policy losses: shapes, PPO's clip, the score form.

`logprobs`, `old_logprobs` / `rollout_logprobs` are log pi(y_t) of the sampled tokens, in nats,
[*batch, tokens]; `advantages` broadcasts against them ([B, 1] is one per sequence); `mask` is boolean,
True on the tokens that count. Nothing is divided here: reduce with `aggregation.aggregate`. Gradients
flow into `logprobs` only.
"""

from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.trust_regions import clipped_surrogate
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens


def clipped(
    ratio: Float[Tensor, "*batch #tokens"],
    advantages: Advantages,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None,
    dual_clip: float | None,
) -> TokenLoss:
    """PPO's clipped surrogate on a ratio per token or per sequence, with its clip fractions."""
    # Masked, because the gradient of a sequence's ratio sums over all advantages of the row.
    advantages = masked_advantages(advantages, mask)
    loss = clipped_surrogate(
        ratio,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_cap=ratio_cap,
        dual_clip=dual_clip,
    )
    r = ratio.detach().expand(mask.shape)
    low = (r < 1 - clip_low) & (advantages < 0)
    high = (r > 1 + clip_high) & (advantages > 0)
    metrics = {
        "ratio": Metric(r, mask),
        "clip_frac_low": Metric(low, mask),
        "clip_frac_high": Metric(high, mask),
    }
    return TokenLoss(keep(loss, mask), metrics)


def score(
    weight: Float[Tensor, "*batch #tokens"], advantages: Advantages, logprobs: Tokens, mask: Mask
) -> Tokens:
    """The score form: -sg(weight) A log pi(y_t), whose gradient in log pi is that of -weight A."""
    return coefficient(weight, advantages, mask) * keep(at_least_float32(logprobs), mask)


def coefficient(weight: Float[Tensor, "*batch #tokens"], advantages: Advantages, mask: Mask) -> Tokens:
    """-weight A of the unmasked tokens, without a gradient; 0 elsewhere."""
    return keep(weight.detach() * -at_least_float32(advantages).detach(), mask)


def masked_advantages(advantages: Advantages, mask: Mask) -> Advantages:
    """The advantages without a gradient, in the shape they came in; 0 where they meet no unmasked token."""
    meets = mask.sum_to_size(advantages.shape) > 0
    return keep(at_least_float32(advantages).detach(), meets)


def token_advantages(advantages: Advantages, mask: Mask) -> Tokens:
    """The advantages of the unmasked tokens, one each, without a gradient; 0 elsewhere."""
    return keep(at_least_float32(advantages).detach(), mask)
