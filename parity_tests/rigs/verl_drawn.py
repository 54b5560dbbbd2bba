"""The batches of `conformance.verl_claims` as Hypothesis strategies, and the scale of their losses."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from composer_plugins.conformance import batches
from composer_plugins.conformance.reductions import verl as reduced
from composer_plugins.testing.strategies import drawn_by


def policy_batches() -> st.SearchStrategy[batches.Batch]:
    """Log-probabilities at any distance, advantages per token or per row, ties and zeros among them."""
    return drawn_by(batches.policy_batch)


def global_batches(mask: Tensor) -> st.SearchStrategy[dict[str, Any]]:
    """What verl passes beside the mode: nothing, or the counts of the whole batch over ranks."""
    return drawn_by(batches.global_batch, mask)


def largest_term(kernel: Callable[..., Any], batch: batches.Batch, mode: str, info: dict[str, Any]) -> float:
    """What the largest token adds to the reduced loss: the scale of a sum, which itself may cancel."""
    terms = kernel(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask).loss.detach()
    terms = (terms if batch.weights is None else terms * batch.weights).requires_grad_()
    (share,) = torch.autograd.grad(reduced(terms, batch.mask, mode, info), terms)
    return float((share * terms.detach()).abs().max())
