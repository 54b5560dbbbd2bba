"""Batches of the tests' strategies outside a test: for a program that wants many, the same each time."""

from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings

from composer_plugins.conformance.reductions import verl as reduced
from composer_plugins.conformance.verl_claims.batches import Batch

T = TypeVar("T")


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """At least `count` examples, and always the same; an example that a strategy refuses is none."""
    found: list[Any] = []
    quiet = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @quiet
    @given(strategy)
    def keep(example: T) -> None:
        found.append(example)

    keep()
    return found


def largest_term(kernel: Callable[..., Any], batch: Batch, mode: str, info: dict[str, Any]) -> float:
    """What the largest token adds to the reduced loss: the scale of a sum, which itself may cancel."""
    terms = kernel(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask).loss.detach()
    terms = (terms if batch.weights is None else terms * batch.weights).requires_grad_()
    (share,) = torch.autograd.grad(reduced(terms, batch.mask, mode, info), terms)
    return float((share * terms.detach()).abs().max())
