"""What losses with a trust region share: which tokens it holds back, the two value forms, the drift term."""

from typing import Literal, NamedTuple

import torch

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.policy.parts import Advantages, Mask, Tokens, credit, score
from composer_plugins.kernels.ratios import importance_weight, log_ratio

Form = Literal["score", "ratio"]


class Region(NamedTuple):
    """The tokens beyond a trust region, below and above, and those that it could not measure (NaN)."""

    low: Mask
    high: Mask
    unknown: Mask


def by_sign(inside: Mask, advantages: Advantages, unknown: Mask) -> Region:
    """A region that bounds a positive advantage above and any other below."""
    return Region(~inside & (advantages <= 0), ~inside & (advantages > 0), unknown)


def frozen(logprobs: Tokens, mask: Mask) -> Tokens:
    """The log-probabilities of the live tokens, without a gradient."""
    return keep(at_least_float32(logprobs).detach(), mask)


def surrogate(weight: Tokens, advantages: Advantages, logprobs: Tokens, mask: Mask, form: Form) -> Tokens:
    """-weight A per token, whose gradient in log pi(y_t) is -weight A too, in one of two value forms.

        score   -sg(weight) A log pi(y_t)
        ratio   -sg(weight) A (1 + log pi(y_t) - sg(log pi(y_t))), which is -r A where r is the weight

    Raises ValueError for any other form.
    """
    if form == "score":
        return score(weight, advantages, logprobs, mask)
    if form == "ratio":
        log_p = keep(at_least_float32(logprobs), mask)
        # The difference is exactly 0, so that the value is the weight's to the last bit.
        one = 1 + (log_p - log_p.detach())
        return keep(weight.detach() * -credit(advantages, mask), mask) * one
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
    ratio = importance_weight(logprobs, rollout_logprobs, clamp=log_ratio_clamp)
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    weight = weight if adv_tau == 1 else adv_tau * weight
    pushes = (~(region.low | region.high)).to(weight).masked_fill(region.unknown, torch.nan)
    loss = surrogate(weight * pushes, advantages, logprobs, mask, form)
    if kl_tau:
        loss = loss + kl_tau * log_ratio(logprobs, rollout_logprobs, mask).square()
    metrics = {
        "ratio": Metric(ratio, mask),
        "masked_low": Metric(region.low, mask),
        "masked_high": Metric(region.high, mask),
    }
    return TokenLoss(loss, metrics)
