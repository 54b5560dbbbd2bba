"""Compare two results within a tolerance that follows from the dtype and the number of terms."""

import torch
from torch import Tensor

ROUNDINGS_PER_TERM = 8  # exp, log, a product or two, a sum: each within half a unit in the last place


def tolerance(dtype: torch.dtype, terms: int, magnitude: float) -> float:
    """The largest difference that rounding explains: eps * roundings per term * terms * largest term."""
    return torch.finfo(dtype).eps * ROUNDINGS_PER_TERM * terms * magnitude


def largest_number(x: Tensor) -> float:
    """The largest finite number by magnitude; 0 without a finite number."""
    finite = x.detach()[x.detach().isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def assert_parity(
    ours: Tensor,
    theirs: Tensor,
    *,
    terms: int,
    dtype: torch.dtype = torch.float64,
    magnitude: float | None = None,
    what: str = "value",
) -> None:
    """Assert equality within `tolerance`; NaN equals NaN, and an infinity the same infinity.

    `dtype` is the coarser side's, `terms` the length of the longest sum behind one number, and
    `magnitude` the largest term of it: by default the largest finite number of `theirs`.
    """
    __tracebackhide__ = True
    ours, theirs = ours.detach().to(torch.float64), theirs.detach().to(torch.float64)
    assert ours.shape == theirs.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    allowed = tolerance(dtype, terms, largest_number(theirs) if magnitude is None else magnitude)
    wrong = ~((ours - theirs).abs() <= allowed)
    wrong &= ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
    if wrong.any():
        rows = [
            f"  {tuple(i.tolist())}: {float(ours[tuple(i)])!r}, wanted {float(theirs[tuple(i)])!r}"
            for i in wrong.nonzero()[:8]
        ]
        count = f"{int(wrong.sum())} of {wrong.numel()} differ by more than {allowed:.3g}"
        largest = (ours - theirs).abs()[wrong].nan_to_num(nan=float("inf")).max()
        raise AssertionError(f"{what}: {count}; max error {float(largest):.6g}\n" + "\n".join(rows))


def largest_term(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> float:
    """A bound on |P log Q| over a vocabulary, P and Q being student or teacher; at least 1.

    A divergence is a difference of such terms: near 0 its rounding is theirs and not its own. And a
    log-probability near 0 is itself a difference, a logit less the log of a sum.
    """
    s = torch.log_softmax(student_logits.detach().double() / temperature, -1)
    t = torch.log_softmax(teacher_logits.detach().double() / temperature, -1)
    terms = torch.maximum(s, t).exp() * -torch.minimum(s, t)
    return float(torch.where(terms.isfinite(), terms, 0.0).max().clamp(min=1))
