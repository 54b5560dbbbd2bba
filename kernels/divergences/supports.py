"""The vocabulary entries on which two distributions are compared: all, or k entries and a rule for the rest.

One of the two models chooses the support, and both are compared on it. The probability P_k of its k
entries is below 1, and upstreams treat the remainder differently:

    renormalised   P_v / P_k: the distribution given that the token is among the k       (OPSD, tinker)
    raw            P_v as it is: no distribution, so a KL may be negative                (verl)
    tail           one more entry of probability 1 - P_k, which keeps the sum at 1       (SDPO, TA-OPD)
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import Logits, LogProbs, Mask

Side = Literal["teacher", "student"]
Rest = Literal["renormalised", "raw", "tail"]

# log P_k is clamped to this far below 0: if k is the whole vocabulary, the tail is log 0 (SDPO, TRL).
LEAST_TAIL = 1e-7


class Pair(NamedTuple):
    """Log-probabilities of student and teacher on one support; the teacher's without gradient."""

    student: LogProbs
    teacher: LogProbs


def check_support(top_k: int | None, top_k_of: str, rest: str, vocab: int) -> None:
    """Raise ValueError for a k beyond the vocabulary, an unknown side and an unknown rule for the rest."""
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"top_k is {top_k}; it lies in [1, {vocab}], the size of the vocabulary")
    if top_k_of not in get_args(Side):
        raise ValueError(f"unknown top_k_of {top_k_of!r}; known: {', '.join(get_args(Side))}")
    if rest not in get_args(Rest):
        raise ValueError(f"unknown rest {rest!r}; known: {', '.join(get_args(Rest))}")


def check_shapes(logits: Tensor, mask: Tensor, **alike: Tensor) -> None:
    """Raise ValueError unless the mask has one entry per token, and the tensors of `alike` their shape."""
    if mask.shape != logits.shape[:-1]:
        raise ValueError(
            f"mask is {_shape(mask)}, and what it masks is {_shape(logits)}: one entry per token"
        )
    for name, x in alike.items():
        if x.shape != logits.shape:
            raise ValueError(f"{name} is {_shape(x)}, and the other side is {_shape(logits)}")


def log_probs(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    temperature: float,
    top_k: int | None = None,
    top_k_of: str = "teacher",
    rest: str = "renormalised",
    *,
    largest_first: bool = False,
) -> Pair:
    """log softmax(logits / temperature) of both on a support; uniform where masked.

    The support is the `top_k` largest entries of one side, or with None the whole vocabulary. The k entries
    are in no order unless `largest_first`, because a sort takes longer than all the rest. If they are most
    of the vocabulary, all of it is returned, and the others have probability 0 on both sides.
    """
    check_support(top_k, top_k_of, rest, student_logits.shape[-1])
    check_shapes(student_logits, mask, teacher_logits=teacher_logits)
    student = _log_softmax(student_logits, mask, temperature)
    teacher = _log_softmax(teacher_logits.detach(), mask, temperature)
    if top_k is None:
        return Pair(student, teacher)
    chooser = teacher if top_k_of == "teacher" else student.detach()
    others = chooser.shape[-1] - top_k
    if others < top_k and not largest_first:
        ids = chooser.topk(others, -1, largest=False, sorted=False).indices
        left_out = Pair(student.scatter(-1, ids, -torch.inf), teacher.scatter(-1, ids, -torch.inf))
        return with_rest(left_out, rest)
    ids = chooser.topk(top_k, -1, sorted=largest_first).indices
    return with_rest(Pair(student.gather(-1, ids), teacher.gather(-1, ids)), rest)


def log_probs_at(
    student_logits: Logits,
    teacher_topk_logprobs: LogProbs,
    teacher_topk_ids: Int[Tensor, "*batch tokens k"],
    mask: Mask,
    temperature: float,
    rest: str,
) -> Pair:
    """The same on a support that a teacher's server chose: its log-probabilities and their entries.

    The temperature divides the student's logits only: the teacher's log-probabilities are given.
    """
    check_shapes(student_logits, mask)
    check_shapes(teacher_topk_logprobs, mask, teacher_topk_ids=teacher_topk_ids)
    check_support(teacher_topk_ids.shape[-1], "teacher", rest, student_logits.shape[-1])
    kept = mask.unsqueeze(-1)
    ids = torch.where(kept, teacher_topk_ids, 0)  # padding may hold any number
    student = _log_softmax(student_logits, mask, temperature).gather(-1, ids)
    teacher = keep(at_least_float32(teacher_topk_logprobs).detach(), kept)
    return with_rest(Pair(student, teacher), rest)


def with_rest(pair: Pair, rest: str) -> Pair:
    """Both sides on k entries, with the rule for the remaining probability applied."""
    if rest == "raw":
        return pair
    change = _renormalised if rest == "renormalised" else _with_tail
    return Pair(change(pair.student), change(pair.teacher))


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _log_softmax(logits: Logits, mask: Mask, temperature: float) -> Logits:
    return torch.log_softmax(keep(at_least_float32(logits), mask.unsqueeze(-1)) / temperature, -1)


def _renormalised(log_p: LogProbs) -> LogProbs:
    return log_p - log_p.logsumexp(-1, keepdim=True)


def _with_tail(log_p: LogProbs) -> Float[Tensor, "*batch tokens k_and_tail"]:
    inside = log_p.logsumexp(-1, keepdim=True).clamp(max=-LEAST_TAIL)
    return torch.cat([log_p, torch.log(-torch.expm1(inside))], -1)
