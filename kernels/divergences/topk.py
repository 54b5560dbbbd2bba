"""Divergences from a teacher that is known by its k largest entries only: what a teacher's server returns."""

from composer_plugins.kernels.divergences import summands
from composer_plugins.kernels.divergences.supports import Pair, Rest, log_probs_at
from composer_plugins.kernels.masking import bounded, keep, with_nan_of
from composer_plugins.kernels.types import Logits, LogProbs, Mask, Metric, TokenLoss, VocabIds

__all__ = ["forward_kl_topk", "generalized_reverse_kl_topk", "reverse_kl_topk", "symmetric_kl_topk"]


def forward_kl_topk(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: VocabIds,
    mask: Mask,
    *,
    rest: Rest = "renormalised",
    temperature: float = 1.0,
    logprob_floor: float | None = None,
    non_negative: bool = False,
    value_cap: float | None = None,
) -> TokenLoss:
    """KL(T || S) on the teacher's k entries: sum_k T_k (log T_k - log S_k).

    `rest` says what becomes of the remaining probability (see `supports`); as "raw" the sum may be
    negative. `temperature` divides the student's logits only: the teacher's numbers are given. Upstream's
    remedies: `logprob_floor` bounds both log-probabilities from below, `non_negative` the sum, at 0, and
    `value_cap` the sum from both sides. Beyond a bound the gradient is 0: with non_negative=True a token
    on whose k entries the student has more probability than the teacher learns nothing.
    Metrics: `student_mass` and `teacher_mass`, the probability of the k entries before the floor.
    Source: arXiv 2306.13649; verl 0.9.1 trainer/distillation/fsdp/losses.py compute_forward_kl_topk
    (rest="raw", logprob_floor=-10, non_negative=True, value_cap=10).
    Raises ValueError for a k above the vocabulary's and for an unknown rest.
    """
    given = student_logits, teacher_topk_logprobs, teacher_topk_ids, mask
    s, t = _floored(log_probs_at(*given, temperature, rest), logprob_floor)
    loss = summands.total(summands.kl(t, s))
    if non_negative:
        loss = loss.clamp(min=0)
    if value_cap is not None:
        loss = loss.clamp(-value_cap, value_cap)
    return TokenLoss(keep(loss, mask), _masses(*given, temperature))


def reverse_kl_topk(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: VocabIds,
    mask: Mask,
    *,
    rest: Rest = "tail",
    temperature: float = 1.0,
    logprob_floor: float | None = None,
) -> TokenLoss:
    """KL(S || T) on the teacher's k entries: sum_k S_k (log S_k - log T_k).

    The paper keeps the remaining probability as one more entry; tinker renormalises (rest="renormalised").
    Metrics: `student_mass` and `teacher_mass`, the probability of the k entries.
    Source: arXiv 2608.14728 (TA-OPD); thinking-machines-lab/tinker-cookbook
    tinker_cookbook/distillation/sdft.py reverse_kl_custom_loss@9dfcc3a.
    Raises ValueError for a k above the vocabulary's and for an unknown rest.
    """
    given = student_logits, teacher_topk_logprobs, teacher_topk_ids, mask
    s, t = _floored(log_probs_at(*given, temperature, rest), logprob_floor)
    return TokenLoss(keep(summands.total(summands.kl(s, t)), mask), _masses(*given, temperature))


def generalized_reverse_kl_topk(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: VocabIds,
    mask: Mask,
    *,
    temperature: float = 1.0,
) -> TokenLoss:
    """MOPD's generalised reverse KL of k entries: sum_k S_k (log S_k - log T_k) - S_k + T_k.

    Neither side is renormalised and no tail is needed: each summand is at least 0, and 0 where S_k = T_k.
    The derivative in S_k is log S_k - log T_k, so an entry has no gradient where the models agree; that of
    the raw sum without the last two terms is larger by 1. The ids need not be the teacher's largest: any k
    entries for which the teacher gives its log-probability, the student's top k for example.
    Metrics: `student_mass` and `teacher_mass`, the probability of the k entries.
    Source: arXiv 2606.30406 (MOPD) eq. 5.
    Raises ValueError for a k above the vocabulary's.
    """
    given = student_logits, teacher_topk_logprobs, teacher_topk_ids, mask
    s, t = log_probs_at(*given, temperature, "raw")
    loss = summands.total(summands.generalized_kl(s, t))
    return TokenLoss(keep(loss, mask), _masses(*given, temperature))


def symmetric_kl_topk(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: VocabIds,
    mask: Mask,
    *,
    reverse_weight: float = 0.5,
    rest: Rest = "renormalised",
    temperature: float = 1.0,
) -> TokenLoss:
    """(1 - reverse_weight) KL(T || S) + reverse_weight KL(S || T) on the teacher's k entries.

    `rest` says what becomes of the remaining probability (see `supports`). The defaults are NeMo-RL's, which
    calls it mixed KL. Metrics: `student_mass` and `teacher_mass`, the probability of the k entries.
    Leaves out NeMo-RL's zero_outside_topk, which compares the student's other entries with e^-100.
    Source: NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py DistillationLossFn@7ea279a.
    Raises ValueError for a k above the vocabulary's and for an unknown rest.
    """
    given = student_logits, teacher_topk_logprobs, teacher_topk_ids, mask
    s, t = log_probs_at(*given, temperature, rest)
    forward, reverse = summands.total(summands.kl(t, s)), summands.total(summands.kl(s, t))
    loss = (1 - reverse_weight) * forward + reverse_weight * reverse
    return TokenLoss(keep(loss, mask), _masses(*given, temperature))


def _floored(pair: Pair, floor: float | None) -> Pair:
    if floor is None:
        return pair
    teacher = pair.teacher.clamp(min=floor)
    # Where the teacher is NaN, the student is too: below the floor the gradient would be 0.
    return Pair(bounded(with_nan_of(pair.student, teacher), low=floor), teacher)


def _masses(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: VocabIds,
    mask: Mask,
    temperature: float,
) -> dict[str, Metric]:
    raw = log_probs_at(
        student_logits.detach(), teacher_topk_logprobs, teacher_topk_ids, mask, temperature, "raw"
    )
    return {f"{side}_mass": Metric(log_p.exp().sum(-1), mask) for side, log_p in raw._asdict().items()}
