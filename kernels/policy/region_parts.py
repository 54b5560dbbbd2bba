"""What losses with a trust region share: which tokens it holds back, the two value forms, the drift term."""

from typing import Literal, NamedTuple

import torch

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, safe_exp
from composer_plugins.kernels.policy.parts import Advantages, Mask, Tokens, coefficient, score
from composer_plugins.kernels.ratios import log_ratio

Form = Literal["score", "ratio"]


class Region(NamedTuple):
    """The tokens in a trust region, those below and above it, and those that it could not measure (NaN).

    `unknown` is None where a NaN would be the ratio's as well, which then shows by itself.
    """

    inside: Mask
    low: Mask
    high: Mask
    unknown: Mask | None = None


def by_sign(inside: Mask, advantages: Advantages, unknown: Mask | None = None) -> Region:
    """A region that bounds a positive advantage above and any other below."""
    outside = ~inside
    high = outside & (advantages > 0)
    return Region(inside, outside ^ high, high, unknown)


def frozen(logprobs: Tokens) -> Tokens:
    """Log-probabilities without a gradient, to be compared: what is masked is dropped with the result."""
    return at_least_float32(logprobs).detach()


def surrogate(
    weight: Tokens, advantages: Advantages, logprobs: Tokens, log_r: Tokens, mask: Mask, form: Form
) -> Tokens:
    """-weight A per token, whose gradient in log pi(y_t) is -weight A too, in one of two value forms.

        score   -sg(weight) A log pi(y_t)
        ratio   -sg(weight) A (1 + log r_t - sg(log r_t)), which is -r A where r is the weight

    Raises ValueError for any other form.
    """
    if form == "score":
        return score(weight, advantages, logprobs, mask)
    if form == "ratio":
        # The difference is exactly 0, so that the value is the weight's to the last bit.
        return coefficient(weight, advantages, mask) * (1 + (log_r - log_r.detach()))
    raise ValueError(f"unknown form {form!r}; known: {', '.join(Form.__args__)}")


def held_back(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    region: Region,
    *,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = None,
    form: Form = "score",
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
) -> TokenLoss:
    """-adv_tau min(r, ratio_cap) M A + kl_tau (log r)^2, with M = 0 beyond the region.

    r is pi / rollout. The drift term (no factor 1/2) stands at every live token, those of M = 0
    included. What the region could not measure is NaN rather than 0: NaN is outside of every bound.
    """
    log_r = log_ratio(logprobs, rollout_logprobs, mask)
    frozen_r = log_r.detach()
    ratio = safe_exp(
        frozen_r if log_ratio_clamp is None else frozen_r.clamp(-log_ratio_clamp, log_ratio_clamp)
    )
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    weight = weight if adv_tau == 1 else adv_tau * weight
    weight = weight * region.inside  # a product, because NaN times 0 is still NaN
    if region.unknown is not None:
        weight = weight.masked_fill(region.unknown, torch.nan)
    loss = surrogate(weight, advantages, logprobs, log_r, mask, form)
    if kl_tau:
        loss = loss + kl_tau * log_r.square()
    metrics = {
        "ratio": Metric(ratio, mask),
        "masked_low": Metric(region.low, mask),
        "masked_high": Metric(region.high, mask),
    }
    return TokenLoss(loss, metrics)
