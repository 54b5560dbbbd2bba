"""Policy losses with a quadratic penalty in place of a clip. Shapes and units: `parts.py`.

A clip ends the gradient of a token that has moved too far. A penalty pulls the token back.
"""

from composer_plugins.kernels.masking import at_least_float32, below_overflow, keep, masked_sum, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages, token_advantages
from composer_plugins.kernels.policy.region_parts import detached
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["drpo", "kimi_k15", "spo"]


def spo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon: float = 0.2,
) -> TokenLoss:
    """Simple policy optimization: a quadratic penalty on the ratio, weighted by the size of the advantage.

        x_t = -A r_t + |A| / (2 epsilon) (r_t - 1)^2,   r_t = pi(y_t) / old(y_t)

    Its minimum is at r_t = 1 + sign(A) epsilon, where PPO's clip begins. Beyond it the gradient pulls back.
    Denominator: "token-mean". DRPO's paper sets epsilon = 12.5 for language models.
    Departs from the authors: (1) a ratio saturates at the root of the largest number, because it is squared.
    Source: arXiv 2401.16025; MyRepositories-hub/Simple-Policy-Optimization atari/trainer.py@9fdeda3;
    as "plain SPO" in Tencent-Hunyuan/UniRL unirl/algorithms/drpo.py@1a7b501.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    ratio = (below_overflow(2 * log_r) / 2).exp()
    loss = -a * ratio + a.abs() / (2 * epsilon) * (ratio - 1).square()
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, 1 - epsilon, 1 + epsilon, a))


def drpo(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: float = 12.5,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """DRPO: DPPO's region of the token's probability, with a quadratic penalty in place of its mask.

        x_t = -A r_t + |A| / (2 delta) q_t (r_t - 1)^2,   r_t = p_t / q_t

    p_t = pi(y_t), q_t = rollout(y_t). The gradient weighs -A r_t by 1 - sign(A) (p_t - q_t) / delta: 0 where
    the probability has moved by delta. A shift is at most 1, so delta above 1 only tapers the update.
    Denominator: "seq-mean-token-sum"; the authors' recipe divides by a constant length too.
    Departs from the authors: (1) without `log_ratio_clamp` (theirs is 20) a ratio saturates at the root of
    the largest number, because it is squared.
    Source: arXiv 2606.09821 eq. 8; Tencent-Hunyuan/UniRL unirl/algorithms/drpo.py@1a7b501 _drpo_loss.
    """
    a = masked_advantages(advantages, mask)
    q = detached(rollout_logprobs)
    log_r = log_ratio(logprobs, with_nan_of(rollout_logprobs, a), mask, clamp=log_ratio_clamp)
    ratio = (below_overflow(2 * log_r) / 2).exp()
    loss = -a * ratio + a.abs() / (2 * delta) * keep(q, mask).exp() * (ratio - 1).square()
    shift = keep(detached(logprobs), mask).exp() - keep(q, mask).exp()
    metrics = {
        "ratio": Metric(ratio.detach(), mask),
        "mask_frac_low": Metric((shift < -delta) & (a < 0), mask),
        "mask_frac_high": Metric((shift > delta) & (a > 0), mask),
    }
    return TokenLoss(keep(loss, mask), metrics)


def kimi_k15(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    tau: float,
) -> TokenLoss:
    """Kimi k1.5's mirror descent: REINFORCE and the square of the whole response's log ratio.

        x_t = -A log pi(y_t) + (tau / 2) log r_t sum_u log r_u,   r_t = pi(y_t) / old(y_t)

    Summed over a response this is -A log pi(y) + (tau / 2) (log pi(y) / old(y))^2. tau is not published, so
    it has no default. With a square per token it is `dro`, which is what ROLL calls kimi15.
    Advantages: `advantages.dr_grpo`. Denominator: "seq-mean-token-sum".
    Source: arXiv 2501.12599 eq. 3, as quoted in alibaba/ROLL roll/pipeline/rlvr/actor_pg_worker.py@8eb27cc.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    square = log_r * masked_sum(log_r, mask, keepdim=True)
    log_pi = keep(at_least_float32(logprobs), mask)
    loss = -token_advantages(advantages, mask) * log_pi + 0.5 * tau * square
    total = masked_sum(log_r.detach(), mask, keepdim=True).expand(mask.shape)
    metrics = {"log_ratio": Metric(log_r.detach(), mask), "sequence_log_ratio": Metric(total, mask)}
    return TokenLoss(keep(loss, mask), metrics)
