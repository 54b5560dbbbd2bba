"""Divergences in plain Python loops."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities over one vocabulary."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def cross_entropy(p: Sequence[float], q: Sequence[float]) -> float:
    """-sum_v p_v log q_v, with 0 log 0 = 0; the entropy of p where q is p."""
    return -math.fsum(a * math.log(b) for a, b in zip(p, q, strict=True) if a > 0)


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """sum_v p_v log(p_v / q_v), with 0 log 0 = 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def generalized_jsd(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    """GKD's divergence between two distributions; beta weights the teacher in the mixture."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def per_token(function: Callable[..., float], *logits: Tensor) -> Tensor:
    """`function(p, q, ...)` of the distributions at each position of [*batch, tokens, vocab]."""
    positions = zip(*(x.flatten(0, -2).tolist() for x in logits), strict=True)
    values = [function(*map(softmax, rows)) for rows in positions]
    return torch.tensor(values, dtype=torch.float64).view(logits[0].shape[:-1])
