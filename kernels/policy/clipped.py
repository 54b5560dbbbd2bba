"""PPO's clip on a ratio per token, and its successors. Shapes and units: `parts.py`."""

import torch

from composer_plugins.kernels.masking import at_most, keep, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["dapo", "dr_grpo", "grpo", "kimi", "ppo", "sapo"]


def ppo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    weight_cap: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate: the larger of the clipped and the unclipped loss.

        x_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)

    `clip_high > clip_low` is DAPO's clip-higher; `dual_clip` bounds the loss by -A * dual_clip where
    A < 0; `ratio_cap` bounds r in the unclipped branch (INTELLECT-2, TRL's `delta`), where its gradient is
    then 0; `weight_cap` bounds the value of r and the weight of its gradient, which stays.
    `dual_clip=3.0, log_ratio_clamp=20.0` is verl's `vanilla`.
    Denominator: "token-mean". The critic's loss and the KL (`kl`) are terms of their own.
    Departs from every upstream: (1) a ratio saturates 10 nats below overflow instead of becoming inf.
    Source: arXiv 1707.06347 eq. 7; 1912.09729 (dual clip); 2505.07291 (two-sided); verl 0.9.1
    core_algos.py compute_policy_loss_vanilla; TRL 1.16 grpo_trainer.py _compute_loss.
    """
    advantages = masked_advantages(advantages, mask)
    old_logprobs = with_nan_of(old_logprobs, advantages)
    log_r = log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp)
    ratio = safe_exp(log_r)
    if weight_cap is not None:  # the difference is exactly 0, and has the gradient
        ratio = ratio.detach().clamp(max=weight_cap) * (1 + (log_r - log_r.detach()))
    unclipped = -advantages * at_most(ratio, ratio_cap)
    loss = torch.maximum(unclipped, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, advantages))


grpo = preset(
    ppo,
    "grpo",
    """GRPO's policy term is PPO's, with `advantages.grpo`.

        x_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)

    The KL to a reference is a term of its own (`kl.k3`). Denominator: "seq-mean-token-mean".
    Source: arXiv 2402.03300 eq. 3; TRL 1.16 `loss_type="grpo"`; as `ppo` otherwise.
    """,
)
dapo = preset(
    ppo,
    "dapo",
    """DAPO is GRPO with clip-higher (0.2, 0.28) and no KL.

        x_t = max(-A r_t, -A clip(r_t, 1 - 0.2, 1 + 0.28)),   r_t = pi(y_t) / old(y_t)

    Its dynamic sampling and overlong reward shaping belong to the rollout, not to the loss.
    Denominator: "token-mean" of the global batch.
    Source: arXiv 2503.14476; TRL 1.16 `loss_type="dapo"`; as `ppo` otherwise.
    """,
    clip_high=0.28,
)
dr_grpo = preset(
    ppo,
    "dr_grpo",
    """Dr. GRPO is GRPO with `advantages.dr_grpo` (no std) and a constant length as the denominator.

        x_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)

    Denominator: "seq-mean-token-sum-norm".
    Source: arXiv 2503.20783; sail-sg/understand-r1-zero train_zero_math.py@dfca49d; sail-sg/oat
    algorithms/ppo.py@c1a074c; TRL 1.16 `loss_type="dr_grpo"`; as `ppo` otherwise.
    """,
)


def sapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """SAPO: a sigmoid gate in place of the clip, so that a gradient fades out instead of stopping.

        x_t = -A (4 / tau) sigmoid(tau (r_t - 1)),   tau = tau_pos if A > 0, tau_neg otherwise

    On-policy the gradient is -A, as PPO's, and the value -2 A / tau.
    Denominator: "seq-mean-token-mean", which verl forces; AReaL takes "token-mean". verl clamps the
    log ratio: `log_ratio_clamp=20.0`.
    Departs from TRL: (1) tau is exact, TRL's is rounded to float32.
    Source: arXiv 2511.20347; verl 0.9.1 compute_policy_loss_sapo; TRL 1.16 grpo_trainer.py.
    """
    advantages = masked_advantages(advantages, mask)
    old_logprobs = with_nan_of(old_logprobs, advantages)
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp))
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss(keep(-advantages * gate, mask), {"ratio": Metric(ratio.detach(), mask)})


def kimi(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    ratio_low: float,
    ratio_high: float,
    tau: float,
) -> TokenLoss:
    """Kimi K2.5's loss: a clip that ignores the sign of the advantage, and a squared log-ratio.

        x_t = -A clip(r_t, ratio_low, ratio_high) + tau (log r_t)^2

    Outside [ratio_low, ratio_high] only the square has a gradient. The square is not halved: with `kl.k2`
    the coefficient is 2 tau. Advantages: `advantages.dr_grpo`. The bounds and tau are not published, so
    they have no default. Denominator: "token-mean".
    Source: arXiv 2602.02276 eq. 1, as quoted in PrimeIntellect-ai/prime-rl#1697; no code is public.
    """
    advantages = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, advantages), mask)
    ratio = safe_exp(log_r)
    loss = -advantages * ratio.clamp(ratio_low, ratio_high) + tau * log_r.square()
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, ratio_low, ratio_high))
