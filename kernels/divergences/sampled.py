"""Divergences estimated from the one token that was sampled, and SDPO, which weights any by a ratio."""

from typing import Literal, get_args

from composer_plugins.kernels.divergences.full import jsd
from composer_plugins.kernels.divergences.supports import Rest, Side
from composer_plugins.kernels.kl import k2, k3
from composer_plugins.kernels.masking import at_least_float32, at_most, keep, safe_exp, with_nan_of
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Logits, Mask, Metric, TokenLoss, Tokens

__all__ = ["importance_weight", "sampled_token", "sdpo"]

Estimator = Literal["score", "k2", "k3"]


def sampled_token(
    student_logprobs: Tokens,
    teacher_logprobs: Tokens,
    mask: Mask,
    *,
    old_logprobs: Tokens | None = None,
    estimator: Estimator = "score",
    log_ratio_clamp: float | None = None,
    value_cap: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """Reverse KL from the sampled token alone, with d_t = log S(y_t) - log T(y_t):

        score   x_t = sg(d) log S(y_t)       a score-function surrogate; its value is not a divergence
        k2      x_t = d^2 / 2                the same gradient
        k3      x_t = exp(-d) + d - 1        the value of a reverse KL, in expectation

    For y_t drawn from S, the expected gradient of the first two is the gradient of KL(S || T). d itself (k1)
    is not a loss: its gradient does not depend on the teacher. `log_ratio_clamp` bounds d in k3 and
    `value_cap` k3 itself (verl: 20, 10). With `old_logprobs` tokens are weighted: see `importance_weight`.
    The metric `kl` is the k1 estimate.
    Source: arXiv 2601.20802 (SDPO) lasgroup/SDPO core_algos.py@0e6d510; TRL 1.16 sdpo/loss_utils.py;
    verl 0.9.1 trainer/distillation/losses.py; siyan-zhao/OPSD opsd_trainer.py@590ec26 ("thinking machines").
    Raises ValueError for an unknown estimator.
    """
    s = keep(at_least_float32(student_logprobs), mask)
    t = keep(at_least_float32(teacher_logprobs), mask).detach()
    weight = None if old_logprobs is None else importance_weight(s, old_logprobs, mask, ratio_cap)
    if weight is not None:  # a clamp of k3 would hide its NaN from the gradient
        t = with_nan_of(t, weight)
    estimate = (s - t).detach()
    if estimator == "score":
        loss = estimate * s
    elif estimator == "k2":
        loss = k2(s, t, mask)
    elif estimator == "k3":
        loss = k3(s, t, mask, log_ratio_clamp=log_ratio_clamp, value_clamp=value_cap)
    else:
        raise ValueError(f"unknown estimator {estimator!r}; known: {', '.join(get_args(Estimator))}")
    if weight is not None:
        loss = loss * weight
    return TokenLoss(keep(loss, mask), {"kl": Metric(estimate, mask)})


def sdpo(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    student_logprobs: Tokens | None = None,
    old_logprobs: Tokens | None = None,
    alpha: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = 100,
    top_k_of: Side = "student",
    rest: Rest = "tail",
    ratio_cap: float | None = 2.0,
) -> TokenLoss:
    """Self-distillation policy optimisation: a generalized JSD on the STUDENT's top k and a tail bucket.

        x_t = sg(min(S(y_t) / S_old(y_t), ratio_cap)) JSD_alpha(T, S)

    `alpha` is `jsd`'s beta, the teacher's weight. The ratio needs both `student_logprobs`, of the sampled
    tokens, and `old_logprobs`; without the latter it is 1. `mask` is the response's where there is a
    teacher to learn from. Denominator: "token-mean"; TRL takes the mean over all rows of a row's mean.
    Defaults are those of upstream's actor.yaml; its dataclass has alpha=0, top_k=None, ratio_cap=None.
    Source: arXiv 2601.20802; lasgroup/SDPO core_algos.py compute_self_distillation_loss@0e6d510.
    Raises ValueError as `jsd` does, and for `old_logprobs` without `student_logprobs`.
    """
    loss = jsd(
        student_logits,
        teacher_logits,
        mask,
        beta=alpha,
        temperature=temperature,
        top_k=top_k,
        top_k_of=top_k_of,
        rest=rest,
    ).loss
    if old_logprobs is None:
        return TokenLoss(loss, {})
    if student_logprobs is None:
        raise ValueError("old_logprobs alone make no ratio: pass student_logprobs as well")
    weight = importance_weight(student_logprobs, old_logprobs, mask, ratio_cap)
    return TokenLoss(keep(loss * weight, mask), {"ratio": Metric(weight, mask)})


def importance_weight(
    student_logprobs: Tokens, old_logprobs: Tokens, mask: Mask, ratio_cap: float | None
) -> Tokens:
    """sg(min(S(y_t) / S_old(y_t), ratio_cap)), 1 where masked; the log ratio is clamped to 20 nats."""
    ratio = safe_exp(log_ratio(student_logprobs, old_logprobs, mask, clamp=20.0).detach())
    return at_most(ratio, ratio_cap)
