"""Random cases for a comparison, drawn by a seed, or by Hypothesis (`strategies.drawn_by`)."""

import random
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Refused(Exception):
    """A case that a comparison cannot use: draw another one."""


class Draw:
    """What a case is drawn from: random numbers that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, values: Sequence[T], label: str = "") -> T:
        """One of these values."""
        return self.random.choice(values)

    def integer(self, low: int, high: int, label: str = "") -> int:
        """An integer from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def number(self, low: float, high: float, label: str = "") -> float:
        """A number between `low` and `high`."""
        return self.random.uniform(low, high)


def assume(usable: bool) -> None:
    """Refuse a case unless it is usable."""
    if not usable:
        raise Refused


def flag(draw: Draw, label: str = "") -> bool:
    """True or False."""
    return draw.choose([False, True], label)


def generator(draw: Draw, label: str = "seed") -> torch.Generator:
    """A generator for the numbers of a case: only its seed is drawn."""
    return torch.Generator().manual_seed(draw.integer(0, 2**32 - 1, label))


def token_batch(draw: Draw, max_rows: int = 5, max_tokens: int = 7) -> dict[str, Tensor]:
    """Draw logprobs, old_logprobs, advantages [B, 1] and a mask, in float64; any row may be masked out."""
    g = generator(draw)
    rows, tokens = draw.integer(1, max_rows, "rows"), draw.integer(1, max_tokens, "tokens")
    spread = draw.choose([0.01, 0.3, 3.0], "log-ratio spread")
    logprobs = -torch.rand(rows, tokens, generator=g, dtype=torch.float64) * 4
    old = (logprobs + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=g) < draw.choose([0.0, 0.3, 0.7, 1.0], "unmasked fraction")
    return {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "mask": mask}


def logit_pair(draw: Draw, *, forbid: bool = True) -> dict[str, Tensor]:
    """Draw student and teacher logits [B, T, V] and a mask; `forbid` allows an entry of -inf in both."""
    g = generator(draw)
    rows, tokens = draw.integer(1, 3, "rows"), draw.integer(1, 4, "tokens")
    vocab = draw.integer(1, 9, "vocab")
    scale = draw.choose([0.1, 1.0, 10.0], "logit scale")
    student = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=torch.float64)
    teacher = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=torch.float64)
    if forbid and vocab > 1 and flag(draw, "a forbidden entry"):
        student[..., 0] = teacher[..., 0] = -torch.inf
    mask = torch.rand(rows, tokens, generator=g) < draw.choose([0.0, 0.6, 1.0], "unmasked fraction")
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask}
