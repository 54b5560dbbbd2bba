"""Hypothesis strategies: log-probabilities, masks with empty rows, advantages, logits, groups of rewards."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis.strategies as st
import torch
from hypothesis import reject
from torch import Tensor

from composer_plugins.testing import draws

T = TypeVar("T")

seeds = st.integers(0, 2**32 - 1)
betas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])  # 0.5 alone cannot see a swapped mixture


class ByHypothesis(draws.Draw):
    """What Hypothesis draws a case from, so that it shrinks one that fails."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def choose(self, values: Sequence[T], label: str = "") -> T:
        """One of these values."""
        return self.draw(st.sampled_from(values), label=label)

    def integer(self, low: int, high: int, label: str = "") -> int:
        """An integer from `low` to `high`, both included."""
        return self.draw(st.integers(low, high), label=label)

    def number(self, low: float, high: float, label: str = "") -> float:
        """A number between `low` and `high`."""
        return self.draw(st.floats(low, high), label=label)


@st.composite
def drawn_by(draw: st.DrawFn, case: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """The strategy of a function that draws a case: `drawn_by(draws.token_batch)`."""
    try:
        return case(ByHypothesis(draw), *args, **keywords)
    except draws.Refused:
        reject()


def token_batches(max_rows: int = 5, max_tokens: int = 7) -> st.SearchStrategy[dict[str, Tensor]]:
    """Draw logprobs, old_logprobs, advantages [B, 1] and a mask, in float64; any row may be masked out."""
    return drawn_by(draws.token_batch, max_rows, max_tokens)


def logit_pairs(*, forbid: bool = True) -> st.SearchStrategy[dict[str, Tensor]]:
    """Draw student and teacher logits [B, T, V] and a mask; `forbid` allows an entry of -inf in both."""
    return drawn_by(draws.logit_pair, forbid=forbid)


@st.composite
def grouped_rewards(draw: st.DrawFn, max_groups: int = 5) -> tuple[Tensor, Tensor]:
    """Draw rewards [rows] in float64, non-dyadic and often tied, with unsorted ids of groups of any size."""
    g = torch.Generator().manual_seed(draw(seeds, label="seed"))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_groups), label="group sizes")
    ids = torch.repeat_interleave(torch.arange(len(sizes)) * 7 - 3, torch.tensor(sizes))
    order = torch.randperm(len(ids), generator=g)
    rewards = torch.randint(0, 5, (len(ids),), generator=g).to(torch.float64) / 10 + draw(
        st.sampled_from([0.0, 0.1, -3.3, 1e6]), label="offset"
    )
    return rewards, ids[order]
