"""Divergences that mix: skewed KLs, weighted sums of both KLs, and the total variation."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from composer_plugins.kernels.divergences import summands
from composer_plugins.kernels.divergences.full import Value, check_value, forward_entries
from composer_plugins.kernels.divergences.supports import Rest, Side, log_probs
from composer_plugins.kernels.masking import keep, with_nan_gradient
from composer_plugins.kernels.types import Logits, LogProbs, Mask, Metric, TokenLoss

__all__ = ["adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl", "symmetric_kl", "tv"]

Weights = Literal["paper", "taid"]


def skewed_forward_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    skew: float = 0.1,
    temperature: float = 1.0,
    value: Value = "kl",
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """KL(T || M) with M = skew T + (1 - skew) S: finite where the student forbids what the teacher allows.

    `skew` weights the TEACHER; in `skewed_reverse_kl` it weights the student. As value="cross-entropy" it is
    -sum_v T_v log M_v, which is what upstream reports: same gradient.
    Source: arXiv 2402.03898; jongwooko/distillm distillm/losses.py skewed_forward_kl@d47e77f.
    Raises ValueError for a skew outside (0, 1) and for an unknown value or support.
    """
    check_value(value)
    _check_skew(skew)
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    entries = forward_entries(summands.mixture(t, s, skew), t, value)
    return TokenLoss(keep(summands.total(entries), mask), {})


def skewed_reverse_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    skew: float = 0.1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """KL(S || M) with M = skew S + (1 - skew) T: finite where the teacher forbids what the student allows.

    `skew` weights the STUDENT; in `skewed_forward_kl` it weights the teacher.
    Source: arXiv 2402.03898; jongwooko/distillm distillm/losses.py skewed_reverse_kl@d47e77f.
    Raises ValueError for a skew outside (0, 1) and for an unknown support.
    """
    _check_skew(skew)
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    entries = summands.kl(s, summands.mixture(s, t, skew))
    return TokenLoss(keep(summands.total(entries), mask), {})


def symmetric_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    reverse_weight: float = 0.9,
    temperature: float = 1.0,
    value: Value = "kl",
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """(1 - reverse_weight) KL(T || S) + reverse_weight KL(S || T); symmetric only at a half.

    `value` is that of the forward part: see `forward_kl`. The default is upstream's.
    Source: jongwooko/distillm distillm/losses.py symmetric_kl@d47e77f (lam), for arXiv 2402.03898.
    Raises ValueError for an unknown value or support.
    """
    check_value(value)
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    forward, reverse = forward_entries(s, t, value), summands.kl(s, t)
    loss = (1 - reverse_weight) * summands.total(forward) + reverse_weight * summands.total(reverse)
    return TokenLoss(keep(loss, mask), {})


def tv(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """Total variation distance: sum_v |T_v - S_v| / 2, in [0, 1] and no logarithm.

    Source: arXiv 2307.15190 (f-distill); jongwooko/distillm distillm/losses.py tv_distance@d47e77f.
    Raises ValueError for an unknown support.
    """
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    loss = with_nan_gradient(summands.total((t.exp() - s.exp()).abs()) / 2)
    return TokenLoss(keep(loss, mask), {})


def adaptive_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    head_mass: float = 0.5,
    weights: Weights = "paper",
    temperature: float = 1.0,
    value: Value = "kl",
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """AKL: both KLs; the more of the difference is on the teacher's head, the more the forward one weighs.

        w KL(T || S) + (1 - w) KL(S || T),   w = sum_head |T - S| / sum_v |T - S|

    The head is the teacher's largest entries of at most `head_mass` together, and at least one. w is
    detached, and a half where the models agree. Metric `forward_weight`: w. With weights="taid" it is as
    in TAID's port, which departs from the paper: (1) entries are marked from the smallest up, as those at
    which the running sum reaches `head_mass`, (2) the mark of the i-th smallest entry is read as that of
    the i-th entry of the vocabulary, (3) the gradient flows through w.
    Source: arXiv 2404.02657; wutaiqiang/LLM_KD_AKL; SakanaAI/TAID src/distil_losses/adaptive_kl.py@a062892.
    Raises ValueError for unknown weights, value or support.
    """
    check_value(value)
    if weights not in get_args(Weights):
        raise ValueError(f"unknown weights {weights!r}; known: {', '.join(get_args(Weights))}")
    in_order = weights == "taid"
    s, t = log_probs(
        student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest, largest_first=in_order
    )
    gap = (t.exp() - s.exp()).abs()
    head = _head(t.exp(), head_mass) if weights == "paper" else _marked_in_taid(t.exp(), head_mass)
    on_head, everywhere = keep(gap, head).sum(-1), gap.sum(-1)
    w = torch.where(everywhere == 0, 0.5, on_head / torch.where(everywhere == 0, 1.0, everywhere))
    if weights == "paper":
        w = w.detach()
    forward, reverse = forward_entries(s, t, value), summands.kl(s, t)
    loss = w * summands.total(forward) + (1 - w) * summands.total(reverse)
    return TokenLoss(keep(loss, mask), {"forward_weight": Metric(w.detach(), mask)})


def _head(p: LogProbs, mass: float) -> Bool[Tensor, "*batch tokens k"]:
    """The largest entries, as long as they sum to at most `mass`; the largest one in any case."""
    largest = p.sort(-1, descending=True)
    inside = largest.values.cumsum(-1) <= mass
    first = torch.arange(p.shape[-1], device=p.device) == 0
    return torch.zeros_like(inside).scatter(-1, largest.indices, inside | first)


def _marked_in_taid(p: LogProbs, mass: float) -> Bool[Tensor, "*batch tokens k"]:
    """The i-th entry, where the i smallest sum to at least `mass`."""
    return p.sort(-1).values.cumsum(-1) >= mass


def _check_skew(skew: float) -> None:
    if not 0 < skew < 1:
        raise ValueError(f"skew is {skew}; a mixture of both models has it in (0, 1)")
