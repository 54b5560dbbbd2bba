"""`Subject`: what a law is about, with what the laws of more than one kind of subject ask of it.

A kernel is a `settings.Setting`, and a function that returns one number a `conventions.function.OneNumber`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from composer_plugins.testing.inputs import Batch

THE_LOSS = "the loss"  # of what a run gives; the names of the rest say which gradients they are
Found = dict[str, Tensor]


class Cut(NamedTuple):
    """A batch in parts: micro-batches of a step, or the rows of each rank."""

    what: str  # "2 micro-batches of 4 rows"
    parts: list[Tensor]  # the rows of each part
    ranks: int = 1


class Signs(NamedTuple):
    """How far descent raises each token of a batch, with its advantages and with their negatives."""

    mask: Tensor  # [rows, tokens]
    advantages: Tensor  # [rows] or [rows, tokens]
    raised: Tensor  # [rows, tokens]
    negated: Tensor  # [rows, tokens]: with the advantages negated


class Subject(Protocol):
    """A loss, called in one way."""

    @property
    def label(self) -> str:
        """The subject and how it is called: "cispo@trl"."""

    def batches(self, to_be_cut: bool = False) -> Iterable[Batch]:
        """Several batches of random numbers; with `to_be_cut` those that the subject can take in parts."""

    def run(
        self, batch: Batch, *, cut: Cut | None = None, seed: int | None = None, weighted: bool = False
    ) -> Found:
        """The loss and its gradients, perhaps of a batch in parts, or with this seed of torch.

        With `weighted` the gradient of a kernel is that of a sum in which each token has its own weight.
        """

    def compare(self, ours: Found, wanted: Found, what: str, *, exactly: bool = False) -> None:
        """Raise BrokenLaw unless two runs agree as well as the subject's rounding allows.

        `what` is a phrase for the message with {} for the loss or a gradient: "with 3 more columns, {}".
        A kernel gives the same bits, if that is asked for by `exactly`.
        """

    def cuts(self, batch: Batch) -> Iterable[Cut]:
        """Ways to cut a batch."""

    def masked(self, batch: Batch, junk: Tensor | None = None) -> Iterator[tuple[str, Batch]]:
        """The batch with `junk`, or with other numbers that the subject must ignore, at masked tokens."""

    def padded(self, batch: Batch) -> Iterator[tuple[str, Batch]]:
        """The batch with more masked columns at its end."""

    def both_signs(self) -> Iterator[Signs]:
        """Yield what descent raises where all policies are equal, or nearly so."""


def micro_batches_and_ranks(rows: int, seed: int, equal: bool = False) -> Iterator[Cut]:
    """Yield rows as 1, 2 and 4 micro-batches, of equal sizes or cut at random places, and as two ranks."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(rows)
    for number in (1, 2, 4):
        ends = torch.randperm(max(rows - 1, 0), generator=generator)[: number - 1].sort().values + 1
        parts = index.chunk(number) if equal else torch.tensor_split(index, ends.tolist())
        kept = [part for part in parts if len(part)]
        yield Cut(f"{len(kept)} micro-batches of {rows} rows", kept)
    ranks = [part for part in (index[::2], index[1::2]) if len(part)]
    yield Cut(f"{len(ranks)} ranks of {rows} rows", ranks, len(ranks))
