"""Shared by policy losses: shapes, what is logged of PPO's clip, the score form.

`logprobs`, `old_logprobs` / `rollout_logprobs` are log pi(y_t) of the sampled tokens, in nats,
[*batch, tokens]; `advantages` broadcasts against them ([B, 1] is one per sequence); `mask` is boolean,
True on the tokens that count. Nothing is divided here: reduce with `aggregation.aggregate`. Gradients
flow into `logprobs` only.
"""

from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import Advantages, Mask, Metric, Tokens


def clip_metrics(
    ratio: Float[Tensor, "*batch #tokens"],
    mask: Mask,
    low: float | Tensor,
    high: float | Tensor,
    advantages: Advantages | None = None,
) -> dict[str, Metric]:
    """The ratio, and where it is below `low` and above `high`.

    With `advantages` only where PPO's clip acts: below where A < 0, above where A > 0.
    """
    r = ratio.detach().expand(mask.shape)
    below, above = r < low, r > high
    if advantages is not None:
        below, above = below & (advantages < 0), above & (advantages > 0)
    return {
        "ratio": Metric(r, mask),
        "clip_frac_low": Metric(below, mask),
        "clip_frac_high": Metric(above, mask),
    }


def score(
    weight: Float[Tensor, "*batch #tokens"] | float, advantages: Advantages, logprobs: Tokens, mask: Mask
) -> Tokens:
    """The score form: -sg(weight) A log pi(y_t), whose gradient in log pi is that of -weight A."""
    return coefficient(weight, advantages, mask) * keep(at_least_float32(logprobs), mask)


def coefficient(
    weight: Float[Tensor, "*batch #tokens"] | float, advantages: Advantages, mask: Mask
) -> Tokens:
    """-weight A of the unmasked tokens, without a gradient; 0 elsewhere."""
    fixed = weight if isinstance(weight, int | float) else weight.detach()
    return keep(fixed * -at_least_float32(advantages).detach(), mask)


def masked_advantages(advantages: Advantages, mask: Mask) -> Advantages:
    """The advantages without a gradient, in the shape they came in; 0 where they meet no unmasked token."""
    meets = mask.sum_to_size(advantages.shape) > 0
    return keep(at_least_float32(advantages).detach(), meets)


def token_advantages(advantages: Advantages, mask: Mask) -> Tokens:
    """The advantages of the unmasked tokens, one each, without a gradient; 0 elsewhere."""
    return keep(at_least_float32(advantages).detach(), mask)
