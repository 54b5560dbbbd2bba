"""Policy losses whose trust region masks tokens: DPPO and its relatives. Shapes and units: `parts.py`.

Each is -min(r, ratio_cap) M A, r = pi(y_t) / rollout(y_t), in one of two value forms with the same
gradient (`form`). They differ in what M measures. `adv_tau` scales the advantage, and `kl_tau` adds
kl_tau (log r)^2 at every unmasked token, masked by M or not: PRIME-RL's and Kimi K2.5's drift term.
"""

import torch

from composer_plugins.kernels.masking import safe_exp
from composer_plugins.kernels.policy.region_parts import Form, Region, by_sign, detached, masked_surrogate
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import (
    binary_kl,
    distance_mask,
    ratio_mask,
    rest_bucket_kl,
    rest_bucket_tv,
    tv_mask,
)
from composer_plugins.kernels.types import Advantages, LogProbs, Mask, TokenLoss, Tokens

__all__ = ["dppo_kl", "dppo_topk_kl", "dppo_topk_tv", "dppo_tv", "ipo", "minirl"]


def dppo_tv(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    tv_low: float = 0.2,
    tv_high: float = 0.2,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = None,
    form: Form = "score",
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
    region_logprobs: Tokens | None = None,
) -> TokenLoss:
    """DPPO-Binary-TV: a token is masked out when its probability, not its ratio, has moved too far.

        x_t = -sg(min(r_t, ratio_cap) M_t) A log pi(y_t),   r_t = pi(y_t) / rollout(y_t)
        M_t = p_t - q_t <= tv_high  if A > 0,  p_t - q_t >= -tv_low  otherwise

    `region_logprobs` are the log-probabilities at the region's centre q, the rollout policy's unless given
    (Stable-RL's `*_recompute`). A bound of 1 or more masks nothing.
    Denominator: "token-mean". Upstream caps: Stable-RL and verl 3 (their actor's default), PRIME-RL none.
    Departs from PRIME-RL: (1) a ratio saturates 10 nats below overflow, and keeps its gradient.
    Source: arXiv 2602.04879; sail-sg/Stable-RL verl/trainer/ppo/core_algos.py@c6af1d1; verl 0.9.1
    compute_policy_loss_dppo_tv; PRIME-RL src/prime_rl/trainer/rl/loss.py@559b447 default_loss_fn.
    """
    centre = rollout_logprobs if region_logprobs is None else region_logprobs
    p, q = detached(logprobs), detached(centre)
    inside = tv_mask(p.exp(), q.exp(), advantages, low=tv_low, high=tv_high)
    region = by_sign(inside, advantages, None if region_logprobs is None else q.isnan())
    return masked_surrogate(
        logprobs,
        rollout_logprobs,
        advantages,
        mask,
        region,
        ratio_cap=ratio_cap,
        log_ratio_clamp=log_ratio_clamp,
        form=form,
        adv_tau=adv_tau,
        kl_tau=kl_tau,
    )


def dppo_kl(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    kl_low: float = 0.05,
    kl_high: float = 0.05,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = None,
    form: Form = "score",
    region_logprobs: Tokens | None = None,
) -> TokenLoss:
    """DPPO-Binary-KL: as `dppo_tv`, with the region measured by KL(Bernoulli(q) || Bernoulli(p)), nats.

        M_t = KL_t <= kl_high or p_t <= q_t  if A > 0,   KL_t <= kl_low or p_t >= q_t  otherwise

    Departs from verl and Stable-RL: (1) where q = 0, or where p is above 1 by rounding, their KL is NaN
    and drops the token; here 0 log 0 = 0 and 1 - p is at least 0.
    Source: arXiv 2602.04879; sail-sg/Stable-RL @c6af1d1; verl 0.9.1 compute_policy_loss_dppo_kl.
    """
    centre = rollout_logprobs if region_logprobs is None else region_logprobs
    p, q = detached(logprobs), detached(centre)
    distance = binary_kl(p, q)
    inside = distance_mask(distance, p.exp(), q.exp(), advantages, low=kl_low, high=kl_high)
    region = by_sign(inside, advantages, distance.isnan())
    return masked_surrogate(
        logprobs,
        rollout_logprobs,
        advantages,
        mask,
        region,
        ratio_cap=ratio_cap,
        log_ratio_clamp=log_ratio_clamp,
        form=form,
    )


def dppo_topk_tv(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    topk_logprobs: LogProbs,
    rollout_topk_logprobs: LogProbs,
    *,
    tv_low: float = 0.2,
    tv_high: float = 0.2,
    ratio_cap: float | None = None,
    form: Form = "score",
) -> TokenLoss:
    """DPPO-TopK-TV: as `dppo_tv`, with the distance between the two distributions over k + 1 buckets.

        TV_t = 1/2 (sum_k |P_k - Q_k| + |rest_P - rest_Q|),   rest = 1 - sum_k, at least 1e-12
        M_t = TV_t <= tv_high or p_t <= q_t  if A > 0,   TV_t <= tv_low or p_t >= q_t  otherwise

    The k entries are the rollout policy's largest, the same ones on both sides; p and q are those of
    the sampled token. Source: arXiv 2602.04879; sail-sg/Stable-RL @c6af1d1 verl/workers/actor/utils.py.
    """
    distance = rest_bucket_tv(*_buckets(topk_logprobs, rollout_topk_logprobs, mask))
    p, q = detached(logprobs), detached(rollout_logprobs)
    inside = distance_mask(distance, p.exp(), q.exp(), advantages, low=tv_low, high=tv_high)
    region = by_sign(inside, advantages, distance.isnan() | q.isnan())
    return masked_surrogate(
        logprobs, rollout_logprobs, advantages, mask, region, ratio_cap=ratio_cap, form=form
    )


def dppo_topk_kl(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    topk_logprobs: LogProbs,
    rollout_topk_logprobs: LogProbs,
    *,
    kl_low: float = 0.05,
    kl_high: float = 0.05,
    ratio_cap: float | None = None,
    form: Form = "score",
) -> TokenLoss:
    """DPPO-TopK-KL: as `dppo_topk_tv`, measured by KL(Q || P) over the k + 1 buckets, in nats.

    Source: arXiv 2602.04879; sail-sg/Stable-RL @c6af1d1 verl/workers/actor/utils.py compute_topk_kl.
    """
    distance = rest_bucket_kl(*_buckets(topk_logprobs, rollout_topk_logprobs, mask))
    p, q = detached(logprobs), detached(rollout_logprobs)
    inside = distance_mask(distance, p.exp(), q.exp(), advantages, low=kl_low, high=kl_high)
    region = by_sign(inside, advantages, distance.isnan() | q.isnan())
    return masked_surrogate(
        logprobs, rollout_logprobs, advantages, mask, region, ratio_cap=ratio_cap, form=form
    )


def ipo(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    tv_low: float = 0.1,
    tv_high: float = 0.1,
    ratio_cap: float | None = None,
    form: Form = "ratio",
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> TokenLoss:
    """INTELLECT policy optimisation: `dppo_tv` with a region that ignores the sign of the advantage.

        x_t = -adv_tau M_t A min(r_t, ratio_cap) + kl_tau (log r_t)^2,   M_t = -tv_low <= p_t - q_t <= tv_high

    A capped ratio keeps its gradient.
    A policy loss: not the preference loss called IPO. Denominator: "token-mean" of the global batch.
    Departs from PRIME-RL: (1) a ratio saturates 10 nats below overflow, and keeps its gradient.
    Source: PRIME-RL src/prime_rl/trainer/rl/loss.py@559b447 ipo_loss_fn; of v0.5.0, default_loss_fn.
    """
    p, q = detached(logprobs), detached(rollout_logprobs)
    shift = p.exp() - q.exp()
    low, high = shift < -tv_low, shift > tv_high
    region = Region(~(low | high), low, high)
    return masked_surrogate(
        logprobs,
        rollout_logprobs,
        advantages,
        mask,
        region,
        ratio_cap=ratio_cap,
        form=form,
        adv_tau=adv_tau,
        kl_tau=kl_tau,
    )


def minirl(
    logprobs: Tokens,
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """MiniRL: PPO's clip as a mask on the old policy's ratio, and the rollout policy's as the weight.

        x_t = -sg(min(pi / rollout, ratio_cap) M_t) A log pi(y_t)
        M_t = pi / old <= 1 + clip_high  if A > 0,   pi / old >= 1 - clip_low  otherwise

    If the old policy is the rollout policy, its gradient is PPO's (Stable-RL's mode `ppo`).
    Denominator: "seq-mean-token-sum".
    Source: arXiv 2512.01374; sail-sg/Stable-RL core_algos.py@c6af1d1, modes ppo, ppo_recompute.
    """
    drift = log_ratio(logprobs, old_logprobs, mask).detach()
    inside = ratio_mask(safe_exp(drift), advantages, low=clip_low, high=clip_high)
    region = by_sign(inside, advantages, drift.isnan())
    return masked_surrogate(logprobs, rollout_logprobs, advantages, mask, region, ratio_cap=ratio_cap)


def _buckets(log_p: LogProbs, log_q: LogProbs, mask: Mask) -> tuple[LogProbs, LogProbs]:
    p, q = (torch.where(mask.unsqueeze(-1), detached(x), -torch.inf) for x in (log_p, log_q))
    return p, q
