"""Shared by losses with a trust region: the tokens it masks out, two value forms, the drift term."""

from typing import Literal, NamedTuple

import torch

from composer_plugins.kernels.masking import at_least_float32, at_most, safe_exp
from composer_plugins.kernels.policy.parts import coefficient, score
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

Form = Literal["score", "ratio"]


class Region(NamedTuple):
    """The tokens inside a trust region, those below it, those above it, and those with a NaN distance.

    `unknown` is None where a NaN distance means a NaN ratio, which reaches the loss by itself.
    """

    inside: Mask
    low: Mask
    high: Mask
    unknown: Mask | None = None


def by_sign(inside: Mask, advantages: Advantages, unknown: Mask | None = None) -> Region:
    """A region with an upper bound where A > 0 and a lower bound elsewhere."""
    outside = ~inside
    high = outside & (advantages > 0)
    return Region(inside, outside ^ high, high, unknown)


def detached(logprobs: Tokens) -> Tokens:
    """Log-probabilities without a gradient, in float32 at least."""
    return at_least_float32(logprobs).detach()


def masked_surrogate(
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
    """-adv_tau min(r, ratio_cap) M A + kl_tau (log r)^2, with M = 0 beyond the region; r is pi / rollout.

    With the weight w = adv_tau min(r, ratio_cap) M, the first term has one of two value forms. Its gradient
    in log pi(y_t) is -w A in both:

        score   -sg(w) A log pi(y_t)
        ratio   -sg(w) A (1 + log r_t - sg(log r_t)), which is -r A where r is the weight

    The drift term (without a factor 1/2) applies to every unmasked token, also where M = 0. A token with a
    NaN distance gets a NaN loss, not 0. Beyond `log_ratio_clamp` the form "ratio" has the gradient 0, as the
    clamped ratio has, and the form "score" keeps its gradient. Raises ValueError for any other form.
    """
    log_r = log_ratio(logprobs, rollout_logprobs, mask)
    drift = log_r.detach()
    ratio = safe_exp(drift if log_ratio_clamp is None else drift.clamp(-log_ratio_clamp, log_ratio_clamp))
    weight = at_most(ratio, ratio_cap)
    weight = weight if adv_tau == 1 else adv_tau * weight
    weight = weight * region.inside  # a product, because NaN times 0 is still NaN
    if region.unknown is not None:
        weight = weight.masked_fill(region.unknown, torch.nan)
    if form == "score":
        loss = score(weight, advantages, logprobs, mask)
    elif form == "ratio":
        factor, slope = coefficient(weight, advantages, mask), log_r
        if log_ratio_clamp is not None:  # NaN keeps its gradient beyond the clamp too
            slope = torch.where((drift.abs() > log_ratio_clamp) & ~factor.isnan(), drift, log_r)
        # The difference is exactly 0, so that the value is the weight's to the last bit.
        loss = factor * (1 + (slope - drift))
    else:
        raise ValueError(f"unknown form {form!r}; known: {', '.join(Form.__args__)}")
    if kl_tau:
        loss = loss + kl_tau * log_r.square()
    metrics = {
        "ratio": Metric(ratio, mask),
        "mask_frac_low": Metric(region.low, mask),
        "mask_frac_high": Metric(region.high, mask),
    }
    return TokenLoss(loss, metrics)
