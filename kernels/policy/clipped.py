"""Policy losses, one short function per published loss, per token: see `README.md` for the contract.

Shared shapes: `logprobs`, `old_logprobs` / `rollout_logprobs` are log pi(y_t) of the sampled tokens, in
nats, [*batch, tokens]; `advantages` broadcasts against them ([B, 1] is one per sequence); `mask` is
boolean, True on the tokens that count. Nothing is divided here: reduce with `aggregation.aggregate`.
Gradients flow into `logprobs` only.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, keep, safe_exp
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio, token_gradient
from composer_plugins.kernels.trust_regions import binary_kl_mask, clipped_surrogate, tv_mask

Tokens = Float[Tensor, "*batch tokens"]
Advantages = Float[Tensor, "*#batch #tokens"]
Mask = Bool[Tensor, "*batch tokens"]


def grpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """GRPO's policy term, which is PPO's clip with a group-relative advantage.

        x_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)

    `clip_high > clip_low` is DAPO's clip-higher. `dual_clip=3.0, log_ratio_clamp=20.0` is verl's
    `vanilla`; `ratio_cap` is TRL's `delta`.
    Denominator: GRPO "seq-mean-token-mean". The KL to a reference is a term of its own (`kl.k3`).
    Departs from both upstreams: (1) a ratio saturates 10 nats below overflow instead of becoming inf.
    Source: arXiv 2402.03300 eq. 3; 1707.06347 eq. 7; 1912.09729 (dual clip); verl 0.9.1
    core_algos.py compute_policy_loss_vanilla; TRL 1.16 grpo_trainer.py _compute_loss.
    """
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp))
    return _clipped(ratio, advantages, mask, clip_low, clip_high, ratio_cap, dual_clip)


def dapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> TokenLoss:
    """DAPO is GRPO with clip-higher (0.2, 0.28), no KL, and "token-mean" over the global batch.

    Its dynamic sampling and overlong shaping live in the rollout, not in the loss.
    Source: arXiv 2503.14476 eq. 8-10.
    """
    return grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def dr_grpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Dr. GRPO is GRPO with `advantages.dr_grpo` (no std) and "seq-mean-token-sum-norm".

    Source: arXiv 2503.20783; sail-sg/understand-r1-zero train_zero_math.py@dfca49d.
    """
    return grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def gspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """GSPO: one ratio per sequence, clipped as PPO clips a token's.

        s = exp(mean_t log r_t);   x_t = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) for every t

    Advantages are per sequence ([B, 1]). The same loss stands at every live token, so
    "seq-mean-token-mean" gives the paper's mean over sequences.
    Source: arXiv 2507.18071 eq. 5; TRL 1.16 `importance_sampling_level="sequence"`.
    """
    ratio = safe_exp(sequence_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask))
    return _clipped(ratio, advantages, mask, clip_low, clip_high, None, None)


def gspo_token(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_cap: float | None = None,
) -> TokenLoss:
    """GSPO-token: the sequence's ratio in value, each token's own gradient; A may differ by token.

        log s_t = sg(log s) + log pi(y_t) - sg(log pi(y_t)),   then as GSPO

    verl's `gspo` is this with `log_ratio_cap=10.0`.
    Source: arXiv 2507.18071 eq. 13-14; verl 0.9.1 core_algos.py compute_policy_loss_gspo.
    """
    sequence = sequence_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask)
    log_s = token_gradient(sequence, keep(at_least_float32(logprobs), mask))
    ratio = safe_exp(log_s if log_ratio_cap is None else log_s.clamp(max=log_ratio_cap))
    return _clipped(ratio, advantages, mask, clip_low, clip_high, None, None)


def cispo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """CISPO: REINFORCE with a clipped, detached ratio as weight, so that no token loses its gradient.

        x_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A log pi(y_t)

    `clip_low=None` sets no lower bound, as the paper does in its experiments.
    Denominator: "token-mean". Departures: (1) TRL's `epsilon_high` is the cap itself, not 1 + eps:
    TRL's e is `clip_high = e - 1`; (2) verl clamps the log ratio: `log_ratio_clamp=20.0`.
    Source: arXiv 2506.13585 eq. 4-5; verl 0.9.1 compute_policy_loss_cispo; TRL 1.16 grpo_trainer.py.
    """
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp)).detach()
    low = None if clip_low is None else 1 - clip_low
    weight = ratio.clamp(low, 1 + clip_high)
    metrics = {
        "ratio": Metric(ratio, mask),
        "clip_low": Metric((weight > ratio).to(ratio), mask),
        "clip_high": Metric((ratio > 1 + clip_high).to(ratio), mask),
    }
    return TokenLoss(_score(weight, advantages, logprobs, mask), metrics)


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
    region_logprobs: Tokens | None = None,
) -> TokenLoss:
    """DPPO-Binary-TV: a token stops pushing when its probability, not its ratio, has moved too far.

        x_t = -sg(min(r_t, ratio_cap) M_t) A log pi(y_t),   r_t = pi(y_t) / rollout(y_t)
        M_t = p_t - q_t <= tv_high  if A > 0,  p_t - q_t >= -tv_low  otherwise

    `region_logprobs` moves the region's centre q off the rollout policy (Stable-RL's `*_recompute`).
    Denominator: "token-mean". Upstream caps: Stable-RL 10, verl 3 (its actor's default), PRIME-RL none.
    Departs from PRIME-RL: (1) the value is of score form; PRIME's -r A has the same gradient.
    Source: arXiv 2602.04879; sail-sg/Stable-RL verl/trainer/ppo/core_algos.py@c6af1d1; verl 0.9.1
    compute_policy_loss_dppo_tv.
    """
    p = keep(at_least_float32(logprobs).detach(), mask)
    q = keep(at_least_float32(rollout_logprobs if region_logprobs is None else region_logprobs), mask)
    inside = tv_mask(p.exp(), q.exp(), advantages, low=tv_low, high=tv_high)
    ratio = safe_exp(log_ratio(logprobs, rollout_logprobs, mask, clamp=log_ratio_clamp)).detach()
    return _masked_score(ratio, q, inside, advantages, logprobs, mask, ratio_cap)


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
    region_logprobs: Tokens | None = None,
) -> TokenLoss:
    """DPPO-Binary-KL: as `dppo_tv`, with the region measured by KL(Bernoulli(q) || Bernoulli(p)), nats.

        M_t = KL_t <= kl_high or p_t <= q_t  if A > 0,   KL_t <= kl_low or p_t >= q_t  otherwise

    Source: arXiv 2602.04879; sail-sg/Stable-RL @c6af1d1; verl 0.9.1 compute_policy_loss_dppo_kl.
    """
    p = keep(at_least_float32(logprobs).detach(), mask)
    q = keep(at_least_float32(rollout_logprobs if region_logprobs is None else region_logprobs), mask)
    inside = binary_kl_mask(p, q, advantages, low=kl_low, high=kl_high)
    ratio = safe_exp(log_ratio(logprobs, rollout_logprobs, mask, clamp=log_ratio_clamp)).detach()
    return _masked_score(ratio, q, inside, advantages, logprobs, mask, ratio_cap)


def _clipped(
    ratio: Float[Tensor, "*batch #tokens"],
    advantages: Advantages,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None,
    dual_clip: float | None,
) -> TokenLoss:
    # Masked, because a ratio per sequence gathers its gradient over all of the row's advantages.
    advantages = _constant(advantages, mask)
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
        "clip_low": Metric(low.to(r), mask),
        "clip_high": Metric(high.to(r), mask),
    }
    return TokenLoss(keep(loss, mask), metrics)


def _score(
    weight: Float[Tensor, "*batch tokens"], advantages: Advantages, logprobs: Tokens, mask: Mask
) -> Tokens:
    log_p = keep(at_least_float32(logprobs), mask)
    return keep(-weight.detach() * _constant(advantages, mask) * log_p, mask)


def _constant(advantages: Advantages, mask: Mask) -> Tokens:
    return keep(at_least_float32(advantages).detach(), mask)


def _masked_score(
    ratio: Tokens,
    region: Tokens,
    inside: Mask,
    advantages: Advantages,
    logprobs: Tokens,
    mask: Mask,
    ratio_cap: float | None,
) -> TokenLoss:
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    metrics = {
        "ratio": Metric(ratio, mask),
        "masked_low": Metric((~inside & (advantages <= 0)).to(ratio), mask),
        "masked_high": Metric((~inside & (advantages > 0)).to(ratio), mask),
    }
    # A NaN compares as outside, and must reach the loss rather than vanish in the mask: that of the
    # weight by way of the product (the weight is otherwise finite), that of the region's centre here.
    pushes = torch.where(region.isnan(), region, inside.to(ratio)).detach()
    return TokenLoss(_score(weight * pushes, advantages, logprobs, mask), metrics)
