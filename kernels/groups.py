"""Sums over groups of rows, and deviations from the mean of a group.

A pool is the group of rows of one prompt, or the whole batch. Everything is vectorised and never waits for
the device: the number of groups is not read, so there are as many slots as rows, most of them empty.

Deviations of equal rewards are exactly 0. A mean of eight times 0.1 is not 0.1 in float32, so a second
pass subtracts the mean of what the first left; the deviations are then a few rounding units, and their
mean is exact.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import GroupIds, Rewards, RowMask

Singleton = Literal["zero", "raw"]


class Pools(NamedTuple):
    """Which rows are summed together: those with the same `slot`, or all (None); only rows of `mask` count.

    `slots` is the number of slots, None for as many as rows.
    """

    slot: Int[Tensor, " rows"] | None
    mask: Bool[Tensor, "..."] | None
    slots: int | None = None

    def keep(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        return x if self.mask is None else keep(x, self.mask)

    def sum(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """One sum per slot."""
        x = self.keep(x)
        if self.slot is None:
            return x.sum()
        slots = torch.zeros_like(x) if self.slots is None else x.new_zeros(self.slots)
        return slots.scatter_add(0, self.slot, x)

    def max(self, x: Rewards) -> Float[Tensor, "..."]:
        """One maximum per slot, -inf for an empty slot."""
        x = x if self.mask is None else torch.where(self.mask, x, -torch.inf)
        if self.slot is None:
            return x.amax()
        slots = torch.zeros_like(x) if self.slots is None else x.new_zeros(self.slots)
        return (slots - torch.inf).scatter_reduce(0, self.slot, x, "amax")

    def rows(self, slots: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """For every row, the value of its slot."""
        return slots if self.slot is None else slots.index_select(0, self.slot)


class Deviations(NamedTuple):
    """Each row's deviation from the mean of its pool, and per slot the terms of a standard deviation."""

    pools: Pools
    value: Float[Tensor, "..."]
    size: Float[Tensor, "..."]
    mean: Float[Tensor, "..."]
    squares: Float[Tensor, "..."]

    def std(self, ddof: int) -> Float[Tensor, "..."]:
        """Per slot, the sample (`ddof=1`) or population (0) standard deviation."""
        return (self.squares / (self.size - ddof).clamp(min=1)).sqrt()

    def is_flat(self, std: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Per slot, whether that deviation is only rounding of the mean."""
        return std <= torch.finfo(std.dtype).eps * self.mean.abs()

    def over_std(self, ddof: int, eps: float) -> Float[Tensor, "..."]:
        """Per slot, 1 / (std + eps); 0 where it is flat: a small eps would magnify the rounding."""
        std = self.std(ddof)
        return torch.where(self.is_flat(std), 0.0, (std + eps).reciprocal())

    def scaled(self, ddof: int, eps: float) -> Float[Tensor, "..."]:
        """The deviations in units of (std + eps), exactly 0 throughout a flat pool."""
        return self.value * self.pools.rows(self.over_std(ddof, eps))

    def flattened(self) -> Float[Tensor, "..."]:
        """The deviations, exactly 0 throughout a flat pool."""
        return torch.where(self.pools.rows(self.is_flat(self.std(0))), 0.0, self.value)

    def sizes(self) -> Float[Tensor, "..."]:
        """For every row, the number of unmasked rows of its pool."""
        return self.pools.rows(self.size)


def grouped(group_ids: GroupIds, mask: RowMask | None, num_groups: int | None = None) -> Pools:
    """One pool per group id; with `num_groups` the ids are 0 .. num_groups - 1 as they are."""
    return Pools(dense(group_ids, num_groups), mask, num_groups)


def dense(group_ids: GroupIds, num_groups: int | None = None) -> Int[Tensor, " rows"]:
    """Group ids renumbered 0, 1, 2 ...: by a sort, because `unique` would sync the host."""
    if num_groups is not None:
        return group_ids.long()
    ranked, order = torch.sort(group_ids)
    ranks = torch.zeros_like(ranked, dtype=torch.int64)
    ranks[1:] = (ranked[1:] != ranked[:-1]).cumsum(0)
    return torch.empty_like(ranks).scatter_(0, order, ranks)


def deviations(
    x: Float[Tensor, "..."], pools: Pools, weights: Shaped[Tensor, "..."] | None = None
) -> Deviations:
    """Deviations from each pool's mean, in float32 at least and detached; 0 where a row is masked.

    With `weights` (lengths, for example) a row counts that many times, in the mean and in the squares.
    """
    x = at_least_float32(x).detach()

    def weigh(y: Tensor) -> Tensor:
        return y if weights is None else y * weights

    size = pools.sum(weigh(torch.ones_like(x)))
    count = size.clamp(min=1)
    mean = pools.sum(weigh(x)) / count
    value = x - pools.rows(mean)
    value = pools.keep(value - pools.rows(pools.sum(weigh(value)) / count))
    return Deviations(pools, value, size, mean, pools.sum(weigh(value.square())))


def with_singletons(advantages: Rewards, group: Deviations, raw: Rewards, singleton: Singleton) -> Rewards:
    """Give a group of one, which has no baseline, 0, or with "raw" its own reward, as in verl's loops."""
    if singleton == "raw":
        advantages = torch.where(group.sizes() == 1, at_least_float32(raw).detach(), advantages)
    elif singleton != "zero":
        raise ValueError(f"singleton is {singleton!r}; known: 'zero', 'raw'")
    return group.pools.keep(advantages)


def batch_normalised(
    x: Float[Tensor, "..."],
    mask: Bool[Tensor, "..."] | None,
    weights: Shaped[Tensor, "..."] | None = None,
    *,
    eps: float = 0.0,
    variance_eps: float = 1e-8,
) -> Float[Tensor, "..."]:
    """Whitening: (x - mean) / (sqrt(var + variance_eps) + eps), with the batch's mean and sample variance."""
    batch = deviations(x, Pools(None, mask), weights)
    std = batch.std(1)
    scale = ((std.square() + variance_eps).sqrt() + eps).reciprocal()
    return batch.value * torch.where(batch.is_flat(std), 0.0, scale)
