"""PPO's clip on a ratio per token, and what became of it. Shapes and units: `parts.py`."""

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import keep, safe_exp
from composer_plugins.kernels.policy.parts import Advantages, Mask, Tokens, clipped, credit
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import soft_gate


def ppo(
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
    """PPO's clipped surrogate, the pessimistic one of two.

        x_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)

    `clip_high > clip_low` is DAPO's clip-higher; `dual_clip` bounds the loss by -A * dual_clip where
    A < 0; `ratio_cap` bounds r in the unclipped branch (INTELLECT-2, TRL's `delta`).
    `dual_clip=3.0, log_ratio_clamp=20.0` is verl's `vanilla`.
    Denominator: "token-mean". The critic's loss and the KL (`kl`) are terms of their own.
    Departs from every upstream: (1) a ratio saturates 10 nats below overflow instead of becoming inf.
    Source: arXiv 1707.06347 eq. 7; 1912.09729 (dual clip); 2505.07291 (two-sided); verl 0.9.1
    core_algos.py compute_policy_loss_vanilla; TRL 1.16 grpo_trainer.py _compute_loss.
    """
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp))
    return clipped(ratio, advantages, mask, clip_low, clip_high, ratio_cap, dual_clip)


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
    """GRPO's policy term is PPO's, with `advantages.grpo` and "seq-mean-token-mean".

    The KL to a reference is a term of its own (`kl.k3`).
    Source: arXiv 2402.03300 eq. 3; TRL 1.16 `loss_type="grpo"`; as `ppo` otherwise.
    """
    bounds = {"ratio_cap": ratio_cap, "dual_clip": dual_clip, "log_ratio_clamp": log_ratio_clamp}
    return ppo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, **bounds)


def dapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_cap: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """DAPO is GRPO with clip-higher (0.2, 0.28), no KL, and "token-mean" over the global batch.

    Its dynamic sampling and overlong shaping live in the rollout, not in the loss.
    Source: arXiv 2503.14476; TRL 1.16 `loss_type="dapo"`; as `ppo` otherwise.
    """
    bounds = {"ratio_cap": ratio_cap, "dual_clip": dual_clip, "log_ratio_clamp": log_ratio_clamp}
    return ppo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, **bounds)


def dr_grpo(
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
    """Dr. GRPO is GRPO with `advantages.dr_grpo` (no std) and "seq-mean-token-sum-norm".

    Source: arXiv 2503.20783; sail-sg/understand-r1-zero train_zero_math.py@dfca49d; sail-sg/oat
    algorithms/ppo.py@c1a074c; TRL 1.16 `loss_type="dr_grpo"`; as `ppo` otherwise.
    """
    bounds = {"ratio_cap": ratio_cap, "dual_clip": dual_clip, "log_ratio_clamp": log_ratio_clamp}
    return ppo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, **bounds)


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
    """SAPO: a sigmoid gate in place of the clip, so that a token fades out instead of stopping.

        x_t = -A (4 / tau) sigmoid(tau (r_t - 1)),   tau = tau_pos if A > 0, tau_neg otherwise

    On-policy the gradient is -A, as PPO's, and the value -2 A / tau.
    Denominator: "seq-mean-token-mean", which verl forces; AReaL takes "token-mean". verl clamps the
    log ratio: `log_ratio_clamp=20.0`.
    Departs from TRL: (1) tau is exact, TRL's is rounded to float32.
    Source: arXiv 2511.20347; verl 0.9.1 compute_policy_loss_sapo; TRL 1.16 grpo_trainer.py.
    """
    advantages = credit(advantages, mask)
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask, clamp=log_ratio_clamp))
    gate = soft_gate(ratio, advantages, tau_pos=tau_pos, tau_neg=tau_neg)
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
    """Kimi K2.5's loss: a clip that does not ask for the advantage's sign, and a squared log-ratio.

        x_t = -A clip(r_t, ratio_low, ratio_high) + tau (log r_t)^2

    A token outside [ratio_low, ratio_high] has no gradient but that of the square. The square is not
    halved: with `kl.k2` the coefficient is 2 tau. Advantages: `advantages.dr_grpo`.
    The bounds and tau are not published, so they have no default. Denominator: "token-mean".
    Source: arXiv 2602.02276 eq. 1, as quoted in PrimeIntellect-ai/prime-rl#1697; no code is public.
    """
    advantages = credit(advantages, mask)
    log_r = log_ratio(logprobs, old_logprobs, mask)
    ratio = safe_exp(log_r)
    r = ratio.detach()
    metrics = {
        "ratio": Metric(r, mask),
        "clip_low": Metric(r < ratio_low, mask),
        "clip_high": Metric(r > ratio_high, mask),
    }
    loss = -advantages * ratio.clamp(ratio_low, ratio_high) + tau * log_r.square()
    return TokenLoss(keep(loss, mask), metrics)
