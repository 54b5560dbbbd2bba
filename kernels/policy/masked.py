"""Policy losses that mask out tokens or whole sequences far from the rollout policy.

Shapes and units: `parts.py`. Unlike a trust region, these masks ignore in which direction a token moves.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.masking import at_most, masked_mean, masked_sum, safe_exp
from composer_plugins.kernels.policy.clipped import ppo
from composer_plugins.kernels.policy.parts import masked_advantages, score
from composer_plugins.kernels.policy.region_parts import Form, Region, detached, masked_surrogate
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import binary_kl
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["kpop", "masked_is", "opsm"]

Level = Literal["token", "sequence"]


def masked_is(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    token_low: float = 0.125,
    token_high: float = 8.0,
    geo_low: float | None = None,
    geo_high: float | None = None,
    sequence_low: float | None = None,
    sequence_high: float | None = None,
    level: Level = "token",
    ratio_cap: float | None = None,
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
) -> TokenLoss:
    """Masked importance sampling: a token whose ratio to the rollout policy is out of bounds is masked out.

        x_t = -sg(R_t M_t (adv_tau A - kl_tau log r_t)) log pi(y_t),   r_t = pi(y_t) / rollout(y_t)
        M_t = token_low <= r_t <= token_high
              and geo_low <= exp(mean_t log r_t) <= geo_high                  (a sequence's mean ratio)
              and sequence_low <= min_t r_t, max_t r_t <= sequence_high       (its worst token)
        R_t = r_t, or with level "sequence" prod_t r_t;  at most ratio_cap

    None means no bound. `kl_tau` is a k1 penalty on the drift, inside the advantage.
    Denominator: "token-mean" of the global batch; in PRIME-RL level "sequence" divides by |y| too.
    Departs from PRIME-RL: (1) a ratio saturates 10 nats below overflow.
    Raises ValueError for an unknown level.
    Source: arXiv 2512.16144 (INTELLECT-3), 2510.18855 (IcePop); PRIME-RL v0.4.0
    src/prime_rl/trainer/rl/loss.py@f870f3c default_loss_fn, whose token bounds are the defaults here.
    """
    log_r = log_ratio(logprobs, rollout_logprobs, mask).detach()
    ratio = safe_exp(log_r)
    mean_ratio = safe_exp(masked_mean(log_r, mask, keepdim=True))
    # With one column more, because a row without tokens has no minimum.
    lowest = F.pad(torch.where(mask, ratio, torch.inf), (0, 1), value=torch.inf).amin(-1, keepdim=True)
    highest = F.pad(torch.where(mask, ratio, 0.0), (0, 1)).amax(-1, keepdim=True)
    low = _below(ratio, token_low) | _below(mean_ratio, geo_low) | _below(lowest, sequence_low)
    high = _above(ratio, token_high) | _above(mean_ratio, geo_high) | _above(highest, sequence_high)
    if level == "token":
        weight = ratio
    elif level == "sequence":
        weight = safe_exp(masked_sum(log_r, mask, keepdim=True)).expand(mask.shape)
    else:
        raise ValueError(f"unknown level {level!r}; known: {', '.join(Level.__args__)}")
    weight = at_most(weight, ratio_cap)
    gain = adv_tau * masked_advantages(advantages, mask)
    if kl_tau:  # 0 times an infinite log ratio would be NaN
        gain = gain - kl_tau * log_r
    # A comparison with NaN is False: a NaN masks no token out, and reaches the loss through its weight.
    inside = ~(low | high)
    metrics = {
        "ratio": Metric(ratio, mask),
        "mask_frac_low": Metric(low, mask),
        "mask_frac_high": Metric(high & ~low, mask),
    }
    return TokenLoss(score(weight * inside.to(ratio), gain, logprobs, mask), metrics)


def kpop(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    kl_max: float = 0.1,
    form: Form = "ratio",
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
) -> TokenLoss:
    """KPop: as `ipo`, with a region measured by the Bernoulli KL in both directions.

        x_t = -adv_tau M_t A r_t + kl_tau (log r_t)^2,   r_t = p_t / q_t
        M_t = max(KL(Bernoulli(p_t) || Bernoulli(q_t)), KL(Bernoulli(q_t) || Bernoulli(p_t))) <= kl_max

    p_t = pi(y_t), q_t = rollout(y_t). The region is wide in the ratio of a rare token, and narrow in that of
    a likely one. Denominator: "token-mean" of the global batch.
    Departs from PRIME-RL's pull request: (1) probabilities are not clamped to [1e-6, 1 - 1e-6].
    Source: ringtech.notion.site/kpop, as described in PrimeIntellect-ai/prime-rl#3283 (not merged), whose
    kpop_threshold is kl_max.
    """
    p, q = detached(logprobs), detached(rollout_logprobs)
    distance = torch.maximum(binary_kl(p, q), binary_kl(q, p))
    outside, below = distance > kl_max, p < q
    region = Region(~outside, outside & below, outside & ~below, distance.isnan())
    return masked_surrogate(
        logprobs, rollout_logprobs, advantages, mask, region, form=form, adv_tau=adv_tau, kl_tau=kl_tau
    )


def opsm(
    logprobs: Tokens,
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    threshold: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """DeepSeek-V3.2's off-policy sequence mask on GRPO: sequences of A < 0 with a large drift are dropped.

        x_t = M max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)
        M = 0  if A < 0 and mean_t (log rollout(y_t) - log pi(y_t)) > threshold,  1 otherwise

    The threshold, in nats per token, is not published. Denominator: as `grpo`.
    Departs from TRL: (1) a NaN rollout log-probability gives a NaN loss; in TRL it counts as no drift.
    Source: arXiv 2512.02556 eq. 9; TRL 1.16 grpo_trainer.py get_off_policy_mask.
    """
    drift = sequence_drift(logprobs, rollout_logprobs, mask)
    old = torch.where(drift.isnan(), torch.nan, old_logprobs)  # so that value and gradient are NaN
    token = ppo(logprobs, old, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    kept = off_policy_sequence_mask(drift, masked_advantages(advantages, mask), threshold=threshold)
    dropped = Metric((~kept).expand(mask.shape), mask)
    seen = kept | token.loss.isnan()  # a dropped sequence does not hide NaN
    return TokenLoss(torch.where(seen, token.loss, 0.0), token.metrics | {"mask_frac_sequence": dropped})


def off_policy_sequence_mask(
    drift: Float[Tensor, "*batch #tokens"], advantages: Advantages, *, threshold: float
) -> Mask:
    """Keep a token if A >= 0, or if its sequence has drifted by at most `threshold` nats per token."""
    return ~((advantages < 0) & (drift > threshold))


def sequence_drift(logprobs: Tokens, rollout_logprobs: Tokens, mask: Mask) -> Float[Tensor, "*batch 1"]:
    """mean_t (log rollout - log pi), in nats: how much less likely the policy finds the sequence."""
    return -masked_mean(log_ratio(logprobs, rollout_logprobs, mask).detach(), mask, keepdim=True)


def _below(value: Float[Tensor, "..."], bound: float | None) -> Bool[Tensor, "..."]:
    return value < (-torch.inf if bound is None else bound)


def _above(value: Float[Tensor, "..."], bound: float | None) -> Bool[Tensor, "..."]:
    return value > (torch.inf if bound is None else bound)
