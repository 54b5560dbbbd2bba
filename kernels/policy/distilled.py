"""On-policy distillation as policy gradients: a teacher's log-probability of each token is its advantage.

The student has sampled the tokens, so that log teacher - log student is, per token, an unbiased
estimate of -KL(student || teacher), the reverse KL. Shapes and units: `parts.py`; `teacher_logprobs` are
log T(y_t) of the sampled tokens, [*batch, tokens]. No whole vocabulary is needed (cf. `divergences`).
"""

import torch

from composer_plugins.kernels.masking import at_least_float32, masked_sum
from composer_plugins.kernels.policy.parts import score, token_advantages
from composer_plugins.kernels.policy.region_parts import Form, by_sign, detached, masked_surrogate
from composer_plugins.kernels.policy.scored import importance_sampling
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import tv_mask
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["iw_opd", "opd", "ref_kl"]


def opd(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    teacher_logprobs: Tokens,
    mask: Mask,
    *,
    advantages: Advantages | None = None,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """On-policy distillation: importance-sampled policy gradient on the teacher's log-ratio.

        x_t = -r_t (A + kl_coef (log T(y_t) - log rollout(y_t))),   r_t = pi(y_t) / rollout(y_t)

    The advantage compares the teacher with the rollout policy, so it is known before the first update.
    `advantages` are those of the task, 0 if not given. Each token has its own advantage: tinker-cookbook
    can add the discounted later ones (its default discount is 0).
    Denominator: "token-sum" in Tinker; "token-mean" elsewhere.
    Source: thinkingmachines.ai/blog/on-policy-distillation; tinker-cookbook
    distillation/train_on_policy.py incorporate_kl_penalty, loss_fn "importance_sampling".
    """
    gap = teacher_gap(teacher_logprobs, rollout_logprobs, mask)
    total = kl_coef * gap if advantages is None else token_advantages(advantages, mask) + kl_coef * gap
    token = importance_sampling(logprobs, rollout_logprobs, total, mask)
    return TokenLoss(token.loss, token.metrics | {"teacher_gap": Metric(gap, mask)})


def ref_kl(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    teacher_logprobs: Tokens,
    mask: Mask,
    *,
    advantages: Advantages | None = None,
    tv_low: float = 0.2,
    tv_high: float = 0.2,
    kl_tau: float = 1e-3,
    form: Form = "ratio",
) -> TokenLoss:
    """PRIME-RL's on-policy distillation: as `opd`, in a trust region, against the current policy.

        x_t = -M_t sg(log T(y_t) - log pi(y_t)) r_t + kl_tau (log r_t)^2,   r_t = pi(y_t) / rollout(y_t)
        M_t = p_t - q_t >= -tv_low

    With `advantages` (v0.6's `opd`), M_t is that of `dppo_tv`: p_t - q_t <= tv_high where A > 0. Only
    their sign is used. Denominator: "token-mean" of the global batch.
    Departs from PRIME-RL: (1) a ratio saturates 10 nats below overflow, and keeps its gradient.
    Source: PRIME-RL src/prime_rl/trainer/rl/loss.py@559b447 ref_kl_loss_fn; of v0.6.0, opd_loss_fn.
    """
    p, q = detached(logprobs), detached(rollout_logprobs)
    sign = torch.zeros_like(p) if advantages is None else token_advantages(advantages, mask)
    inside = tv_mask(p.exp(), q.exp(), sign, low=tv_low, high=tv_high)
    gap = teacher_gap(teacher_logprobs, logprobs, mask)
    region = by_sign(inside, sign, q.isnan() | sign.isnan())
    token = masked_surrogate(logprobs, rollout_logprobs, gap, mask, region, form=form, kl_tau=kl_tau)
    return TokenLoss(token.loss, token.metrics | {"teacher_gap": Metric(gap, mask)})


def iw_opd(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    teacher_logprobs: Tokens,
    mask: Mask,
    *,
    gamma: float = 0.5,
    eps: float = 1e-8,
) -> TokenLoss:
    """Importance-weighted on-policy distillation: early disagreement with the teacher counts for more.

        x_t = -w_t A_t log pi(y_t),   A_t = sg(log T(y_t) - log rollout(y_t))
        w_t = 1 + gamma (1 - sum_{u<t} |A_u| / max(sum_u |A_u|, eps))

    The first unmasked token weighs 1 + gamma, and the weight falls to 1 over the sequence.
    There is no ratio: on-policy, pass `logprobs` as `rollout_logprobs`. Denominator: "token-mean".
    Departs from TRL: (1) a teacher's log-probability that is missing (NaN) is a NaN loss, TRL raises.
    Source: arXiv 2606.22600; TRL 1.16 experimental/iw_opd/iw_opd_trainer.py _compute_iw_opd_loss.
    """
    gap = teacher_gap(teacher_logprobs, rollout_logprobs, mask)
    size = gap.abs()
    before = size.cumsum(-1) - size
    weight = 1 + gamma * (1 - before / masked_sum(size, mask, keepdim=True).clamp(min=eps))
    metrics = {"weight": Metric(weight, mask), "teacher_gap": Metric(gap, mask)}
    return TokenLoss(score(weight, gap, logprobs, mask), metrics)


def teacher_gap(teacher_logprobs: Tokens, student_logprobs: Tokens, mask: Mask) -> Tokens:
    """log T(y_t) - log S(y_t) where `mask`, without a gradient: an estimate of -KL(S || T) from one token."""
    return log_ratio(at_least_float32(teacher_logprobs).detach(), student_logprobs, mask)
