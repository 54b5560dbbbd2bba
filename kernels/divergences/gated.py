"""EOPD's addition to on-policy distillation: the forward KL where the teacher's entropy is high."""

from composer_plugins.kernels.divergences.full import forward_kl
from composer_plugins.kernels.divergences.fused import entropy
from composer_plugins.kernels.divergences.supports import Rest, Side
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.types import Logits, Mask, Metric, TokenLoss

__all__ = ["entropy_gated_kl"]


def entropy_gated_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    min_entropy: float,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
) -> TokenLoss:
    """1[H(T) > min_entropy] KL(T || S): a hard gate on the teacher's entropy over the whole vocabulary.

    The entropy, in nats, is that of softmax(logits / temperature). EOPD adds this, times a weight, to a
    clipped policy loss whose advantage is log T(y_t) - log S_old(y_t). The paper's constant could not be
    checked, so `min_entropy` has no default. Metrics: `gate_frac`, 1 where it is open, `teacher_entropy`.
    Departures: (1) NaN logits of either model give NaN, whatever the gate.
    Source: arXiv 2603.07079 (EOPD); its code, WLS04/EOPD, is not available.
    Raises ValueError for an unknown support.
    """
    divergence = forward_kl(
        student_logits,
        teacher_logits,
        mask,
        temperature=temperature,
        top_k=top_k,
        top_k_of=top_k_of,
        rest=rest,
    ).loss
    h = entropy(teacher_logits, mask, temperature=temperature)
    is_open = (h > min_entropy) & mask
    metrics = {"gate_frac": Metric(is_open.to(h.dtype), mask), "teacher_entropy": Metric(h, mask)}
    return TokenLoss(keep(divergence, is_open | divergence.isnan()), metrics)
