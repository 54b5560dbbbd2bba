"""Logits of a student and a teacher, and how precise a sum over their vocabulary is."""

import pytest
import torch
from torch import Tensor

from composer_plugins.testing.assertions import largest_term

Pair = dict[str, Tensor]
each_beta = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])


def scale(pair: Pair, lost: float = 1.0) -> dict[str, float]:
    """How many terms the sum has, and how large they are; `lost` is what a difference before it magnifies."""
    student, teacher = pair["student_logits"], pair["teacher_logits"]
    return {"terms": student.shape[-1], "magnitude": lost * largest_term(student, teacher)}


def example(*shape: int, dtype: torch.dtype = torch.float64) -> Pair:
    """A fixed pair of logits, all positions unmasked."""
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, *shape, generator=g, dtype=torch.float64).to(dtype)
    return {
        "student_logits": student,
        "teacher_logits": teacher,
        "mask": torch.ones(shape[:-1], dtype=torch.bool),
    }
