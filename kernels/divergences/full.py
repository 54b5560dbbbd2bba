"""GKD's family: forward KL, reverse KL and the generalized Jensen-Shannon divergence between them."""

from typing import Literal, get_args

from composer_plugins.kernels.divergences import summands
from composer_plugins.kernels.divergences.fused import entropy, generalized_jsd, generalized_jsd_of
from composer_plugins.kernels.divergences.supports import Rest, Side, check_support, log_probs
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.types import Logits, LogProbs, Mask, TokenLoss

__all__ = ["forward_kl", "jsd", "reverse_kl"]

Value = Literal["kl", "cross-entropy"]


def forward_kl(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    temperature: float = 1.0,
    value: Value = "kl",
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
    entry_clip: float | None = None,
) -> TokenLoss:
    """Forward KL, mean-seeking: KL(T || S) = sum_v T_v (log T_v - log S_v).

    With value="cross-entropy" it is -sum_v T_v log S_v, larger by the teacher's entropy: DistiLLM's and
    TAID's "forward KL", of the same gradient. `entry_clip` bounds each summand from above (OPSD calls it
    token clip), so that the sum may turn negative. The support: see `supports`.
    Source: arXiv 2306.13649 (GKD, beta = 0); TRL 1.16 experimental/gkd/gkd_trainer.py.
    Raises ValueError for an unknown value or support.
    """
    check_value(value)
    if top_k is None and entry_clip is None:
        check_support(top_k, top_k_of, rest, student_logits.shape[-1])
        loss = generalized_jsd(student_logits, teacher_logits, mask, beta=0.0, temperature=temperature)
        if value == "cross-entropy":
            loss = loss + entropy(teacher_logits, mask, temperature=temperature)
        return TokenLoss(loss, {})
    pair = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    if value == "kl" and entry_clip is None:
        return TokenLoss(generalized_jsd_of(pair, mask, beta=0.0), {})
    entries = forward_entries(pair.student, pair.teacher, value)
    return TokenLoss(keep(summands.total(entries, entry_clip), mask), {})


def jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_k_of: Side = "teacher",
    rest: Rest = "renormalised",
    entry_clip: float | None = None,
) -> TokenLoss:
    """Generalized Jensen-Shannon divergence; beta weights the TEACHER in the mixture.

        beta KL(T || M) + (1 - beta) KL(S || M),   M = beta T + (1 - beta) S
        beta = 0: KL(T || S)  (forward)            beta = 1: KL(S || T)  (reverse)

    At 0 and 1 the result is a full KL by convention, not the limit: near 0 and near 1 the value vanishes like
    beta KL(T || S) and (1 - beta) KL(S || T), so avoid 0 < beta < 0.05 and 0.95 < beta < 1.
    `entry_clip` bounds each summand over the vocabulary from above (OPSD's token clip).
    Source: arXiv 2306.13649 eq. 1; TRL 1.16 (GKD, SDPO, SDFT), siyan-zhao/OPSD opsd_trainer.py@590ec26.
    Raises ValueError for beta outside [0, 1] and for an unknown support.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; the teacher's weight in the mixture lies in [0, 1]")
    if top_k is None and entry_clip is None:
        check_support(top_k, top_k_of, rest, student_logits.shape[-1])
        logits = student_logits, teacher_logits
        return TokenLoss(generalized_jsd(*logits, mask, beta=beta, temperature=temperature), {})
    pair = log_probs(student_logits, teacher_logits, mask, temperature, top_k, top_k_of, rest)
    if entry_clip is None:
        return TokenLoss(generalized_jsd_of(pair, mask, beta=beta), {})
    entries = summands.jsd(pair.student, pair.teacher, beta)
    return TokenLoss(keep(summands.total(entries, entry_clip), mask), {})


reverse_kl = preset(
    jsd,
    "reverse_kl",
    """Reverse KL, mode-seeking: KL(S || T) = sum_v S_v (log S_v - log T_v).

    Source: arXiv 2306.08543 (MiniLLM), 2306.13649 (GKD, beta = 1); TRL 1.16 gkd_trainer.py.
    """,
    without=("beta",),
    beta=1.0,
)


def check_value(value: str) -> None:
    """Raise ValueError unless `value` is a word for what a forward KL reports."""
    if value not in get_args(Value):
        raise ValueError(f"unknown value {value!r}; known: {', '.join(get_args(Value))}")


def forward_entries(log_s: LogProbs, log_t: LogProbs, value: Value) -> LogProbs:
    """The summands of KL(T || S), or of the cross-entropy."""
    return summands.kl(log_t, log_s) if value == "kl" else summands.cross_entropy(log_t, log_s)
