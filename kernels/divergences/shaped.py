"""Divergences that count some entries more: alpha-beta, ToDi's weights, and sorted probabilities (ULD)."""

import torch

from composer_plugins.kernels.divergences import summands
from composer_plugins.kernels.divergences.supports import Rest, Side, log_probs
from composer_plugins.kernels.masking import keep, with_nan_gradient
from composer_plugins.kernels.types import Logits, Mask, TokenLoss

__all__ = ["alpha_beta", "todi", "uld"]


def alpha_beta(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """ABKD's alpha-beta divergence: alpha weighs where the teacher is surer, beta where the student is.

        -1 / (alpha beta) sum_v [T^alpha S^beta - alpha / c T^c - beta / c S^c],   c = alpha + beta

    (1, 0) is KL(T || S), (0, 1) is KL(S || T), and alpha + beta = 1 the alpha divergence: at (0.5, 0.5) four
    times the squared Hellinger distance. alpha and beta are not negative, and not both 0.
    Departs from its authors: (1) at alpha = 0 or beta = 0 it is the limit of the formula; theirs is beta
    or alpha times that.
    Source: arXiv 2505.04560; ghwang-s/abkd distillation_llm/distillm/losses.py ab_div@df81318.
    Raises ValueError for alpha and beta that are negative or both 0, and for an unknown support.
    """
    if min(alpha, beta) < 0 or max(alpha, beta) < summands.LIMIT:
        raise ValueError(f"alpha is {alpha} and beta {beta}; neither is negative, and one is above 0")
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    return TokenLoss(keep(summands.total(summands.alpha_beta(s, t, alpha, beta)), mask), {})


def todi(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """ToDi: each entry has its own mix of both KLs, by how much more likely the teacher finds it.

        sum_v sg(a_v) T_v (log T_v - log S_v) + sg(1 - a_v) S_v (log S_v - log T_v)
        a_v = sigmoid(log T_v - log S_v)

    The forward KL lifts what the student underestimates, the reverse KL lowers what it overestimates. a is
    detached.
    Source: arXiv 2505.16297; jungseongryong/ToDi code/criterions/various_divergence.py compute_ToDi@45f1f8b.
    Raises ValueError for an unknown support.
    """
    s, t = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    gap = (t - s).detach()
    impossible = (t == -torch.inf) & (s.detach() == -torch.inf)  # on both sides: no gap
    a = torch.sigmoid(gap.masked_fill(impossible, 0.0))
    entries = a * summands.kl(t, s) + (1 - a) * summands.kl(s, t)
    return TokenLoss(keep(summands.total(entries), mask), {})


def uld(student_logits: Logits, teacher_logits: Logits, mask: Mask, *, temperature: float = 1.0) -> TokenLoss:
    """ULD: sum_i |S_(i) - T_(i)|, the i-th largest probability of each: which tokens these are is ignored.

    For a teacher with another tokenizer: the two vocabularies need not mean the same. Pad the logits of the
    smaller one with -inf. It is a Wasserstein distance with the same cost between any two entries.
    TRL divides by the tokens of a completion, and then by completions: "seq-mean-token-mean".
    Source: arXiv 2402.12030; TRL 1.16 experimental/gold/gold_trainer.py ULDLoss._compute_distillation_loss.
    """
    s, t = log_probs(student_logits, teacher_logits, mask, temperature)
    s_sorted, t_sorted = (log_p.exp().sort(-1, descending=True).values for log_p in (s, t))
    return TokenLoss(keep(with_nan_gradient(summands.total((s_sorted - t_sorted).abs())), mask), {})
