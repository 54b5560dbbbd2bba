"""The batches of `conformance.verl_claims` as Hypothesis strategies, and which rows are verl's too."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import hypothesis.strategies as st
from torch import Tensor

from composer_plugins.conformance.verl_claims import batches
from composer_plugins.conformance.verl_claims.advantages import by_group
from composer_plugins.conformance.verl_claims.upstream import of_verl
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss
from composer_plugins.testing.strategies import drawn_by


def policy_batches() -> st.SearchStrategy[batches.Batch]:
    """Log-probabilities at any distance, advantages per token or per row, ties and zeros among them."""
    return drawn_by(batches.policy_batch)


def global_batches(mask: Tensor) -> st.SearchStrategy[dict[str, Any]]:
    """What verl passes beside the mode: nothing, or the counts of the whole batch over ranks."""
    return drawn_by(batches.global_batch, mask)


def rollouts(min_group: int = 1) -> st.SearchStrategy[batches.Rollouts]:
    """Groups of any size in any order; rewards non-dyadic and often tied, small beside their offset too."""
    return drawn_by(batches.rollouts, min_group)


def assert_rows_equal(ours: Tensor, theirs: Tensor, batch: batches.Rollouts, *, eps: float) -> None:
    """Advantages per row equal verl's per token, group by group; `eps` is added to a deviation."""
    __tracebackhide__ = True
    for group in by_group(ours, theirs, batch, eps=eps):
        group.check()


def with_dialect(kind: Kind) -> list[Loss]:
    """The rows of one kind that say what they are in verl (in this version: not those of "verl<0.7.1")."""
    return [
        loss for loss in losses() if loss.kind == kind and any(d.upstream == "verl" for d in loss.dialects)
    ]


def assert_complete(
    registry: Mapping[str, Callable[..., Any]], compared: Iterable[str], reasons: Mapping[str, str]
) -> None:
    """Every name of a registry is compared or has a reason not to be, and none is listed that is gone."""
    __tracebackhide__ = True
    compared = set(compared)
    assert not compared & set(reasons), "compared, and yet with a reason not to be"
    assert not of_verl(registry) - compared - set(reasons), "verl has more: compare them, or say why not"
    assert not (compared | set(reasons)) - of_verl(registry), "verl has no longer what is listed"
