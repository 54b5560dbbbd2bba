"""Distillation divergences between a student S and a teacher T, per token, in nats.

Full-vocabulary forms take logits [*batch, tokens, vocab] of both; the sampled-token form takes the two
log-probabilities of the token that was drawn. Softmax runs in float32 at least. Gradients flow into the
student only. 0 log 0 = 0, so a vocabulary entry that is -inf on both sides contributes nothing; one the
teacher allows and the student forbids makes KL(T || S) infinite, and one the student allows and the
teacher forbids KL(S || T), and honestly so.

`temperature` divides both logits; there is no temperature^2 factor. Reduce with `aggregation.aggregate`.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, keep

Logits = Float[Tensor, "*batch tokens vocab"]
Mask = Bool[Tensor, "*batch tokens"]


def forward_kl(
    student_logits: Logits, teacher_logits: Logits, mask: Mask, *, temperature: float = 1.0
) -> TokenLoss:
    """Forward KL, mean-seeking: KL(T || S) = sum_v T_v (log T_v - log S_v).

    Departs from TAID and DistiLLM, whose "forward KL" is the cross-entropy: (1) same gradient, but this
    value is 0 at S = T.
    Source: arXiv 2306.13649 (GKD, beta = 0); TRL 1.16 experimental/gkd/gkd_trainer.py.
    """
    pair = _log_softmax(student_logits, teacher_logits, mask, temperature)
    return TokenLoss(keep(_kl(pair.teacher, pair.student, pair.teacher_zero), mask), {})


def reverse_kl(
    student_logits: Logits, teacher_logits: Logits, mask: Mask, *, temperature: float = 1.0
) -> TokenLoss:
    """Reverse KL, mode-seeking: KL(S || T) = sum_v S_v (log S_v - log T_v).

    Source: arXiv 2306.08543 (MiniLLM), 2306.13649 (GKD, beta = 1); TRL 1.16 gkd_trainer.py.
    """
    pair = _log_softmax(student_logits, teacher_logits, mask, temperature)
    return TokenLoss(keep(_kl(pair.student, pair.teacher, pair.student_zero), mask), {})


def jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> TokenLoss:
    """Generalized Jensen-Shannon divergence; beta weights the TEACHER in the mixture.

        beta KL(T || M) + (1 - beta) KL(S || M),   M = beta T + (1 - beta) S
        beta = 0: KL(T || S)  (forward)            beta = 1: KL(S || T)  (reverse)

    The ends are full KLs by convention and not limits: near 0 and near 1 the value vanishes like
    beta KL(T || S) and (1 - beta) KL(S || T), so avoid 0 < beta < 0.05 and 0.95 < beta < 1.
    Source: arXiv 2306.13649 eq. 1; TRL 1.16 (GKD, SDPO, SDFT), siyan-zhao/OPSD opsd_trainer.py@590ec26.
    Raises ValueError for beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; the teacher's weight in the mixture lies in [0, 1]")
    if beta == 0:
        return forward_kl(student_logits, teacher_logits, mask, temperature=temperature)
    if beta == 1:
        return reverse_kl(student_logits, teacher_logits, mask, temperature=temperature)
    s, t, student_zero, teacher_zero = _log_softmax(student_logits, teacher_logits, mask, temperature)
    # The gradient through the mixture is -sum_v dM_v = 0, because M sums to 1 whatever S does.
    mixture = torch.logaddexp(s.detach() + math.log1p(-beta), t + math.log(beta))
    loss = beta * _kl(t, mixture, teacher_zero) + (1 - beta) * _kl(s, mixture, student_zero)
    return TokenLoss(keep(loss, mask), {})


def sampled_token(
    student_logprobs: Float[Tensor, "*batch tokens"],
    teacher_logprobs: Float[Tensor, "*batch tokens"],
    mask: Mask,
) -> TokenLoss:
    """Reverse KL from the sampled token alone, as a score-function surrogate.

        x_t = sg(log S(y_t) - log T(y_t)) log S(y_t)

    Its expected gradient, for y_t drawn from S, is that of KL(S || T); its value is not a divergence.
    The metric `kl` is: the k1 estimate log S(y_t) - log T(y_t).
    Source: arXiv 2601.20802 (SDPO) lasgroup/SDPO core_algos.py@0e6d510; TRL 1.16 sdpo/loss_utils.py.
    """
    s = keep(at_least_float32(student_logprobs), mask)
    t = keep(at_least_float32(teacher_logprobs), mask).detach()
    estimate = (s - t).detach()
    return TokenLoss(keep(estimate * s, mask), {"kl": Metric(estimate, mask)})


class _Pair(NamedTuple):
    """Log-probabilities with every zero-probability entry replaced by 0 and marked as such."""

    student: Logits
    teacher: Logits
    student_zero: Bool[Tensor, "*batch tokens vocab"]
    teacher_zero: Bool[Tensor, "*batch tokens vocab"]


def _log_softmax(student: Logits, teacher: Logits, mask: Mask, temperature: float) -> _Pair:
    # A masked position may hold anything, NaN included: softmax there must see finite numbers.
    live = mask.unsqueeze(-1)
    s = torch.log_softmax(keep(at_least_float32(student), live) / temperature, -1)
    t = torch.log_softmax(keep(at_least_float32(teacher).detach(), live) / temperature, -1)
    # A probability that underflows is 0 as well: 0 * (log 0 - log 0) would be NaN, not 0.
    return _Pair(s, t, s.exp() == 0, t.exp() == 0)


def _kl(
    p: Logits, q: Logits, p_is_zero: Bool[Tensor, "*batch tokens vocab"]
) -> Float[Tensor, "*batch tokens"]:
    """sum_v P_v (log P_v - log Q_v) over the entries where P_v > 0, safe to differentiate in both."""
    p = p.masked_fill(p_is_zero, 0.0)
    q = q.masked_fill(p_is_zero, 0.0)
    return (p.exp() * (p - q)).masked_fill(p_is_zero, 0.0).sum(-1)
