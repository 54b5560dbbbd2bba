"""The machinery of advantages: sums over pools of rows, and deviations from a pool's mean.

A pool is a prompt's group of rows, or the whole batch. Everything is vectorised, without a host sync: the
number of groups is never read back, so there are as many slots as rows and most of them stay empty.

Deviations of equal rewards are exactly 0. A mean of eight times 0.1 is not 0.1 in float32, so a second
pass takes off the mean of what the first left; the deviations are then a few rounding units, and their
mean is exact.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep

Rewards = Float[Tensor, " rows"]
GroupIds = Int[Tensor, " rows"]
RowMask = Bool[Tensor, " rows"]
Lengths = Int[Tensor, " rows"] | Float[Tensor, " rows"]
Singleton = Literal["zero", "raw"]


class Pools(NamedTuple):
    """Which rows are summed together: those of one `slot`, or with None all; only `live` rows count.

    There are `slots` of them, or with None as many as rows.
    """

    slot: Int[Tensor, " rows"] | None
    live: Bool[Tensor, "..."] | None
    slots: int | None = None

    def keep(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return x if self.live is None else keep(x, self.live)

    def sum(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """One sum per slot."""
        x = self.keep(x)
        if self.slot is None:
            return x.sum()
        slots = torch.zeros_like(x) if self.slots is None else x.new_zeros(self.slots)
        return slots.scatter_add(0, self.slot, x)

    def max(self, x: Rewards) -> Float[Tensor, "..."]:
        """One maximum per slot, -inf where nothing is live."""
        x = x if self.live is None else torch.where(self.live, x, -torch.inf)
        if self.slot is None:
            return x.amax()
        slots = torch.zeros_like(x) if self.slots is None else x.new_zeros(self.slots)
        return (slots - torch.inf).scatter_reduce(0, self.slot, x, "amax")

    def rows(self, slots: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Of every row, what its slot holds."""
        return slots if self.slot is None else slots.index_select(0, self.slot)


class Deviations(NamedTuple):
    """How far every row is from the mean of its pool, and per slot what a standard deviation needs."""

    pools: Pools
    value: Float[Tensor, "..."]
    size: Float[Tensor, "..."]
    mean: Float[Tensor, "..."]
    squares: Float[Tensor, "..."]

    def std(self, ddof: int) -> Float[Tensor, "..."]:
        """Per slot, the sample (`ddof=1`) or population (0) standard deviation."""
        return (self.squares / (self.size - ddof).clamp(min=1)).sqrt()

    def is_flat(self, std: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Per slot, whether that deviation is but rounding of the mean; a single row's is exactly 0."""
        return std <= torch.finfo(std.dtype).eps * self.mean.abs()

    def over_std(self, ddof: int, eps: float) -> Float[Tensor, "..."]:
        """Per slot, 1 / (std + eps), and 0 where it is flat: a small eps would blow the rounding up."""
        std = self.std(ddof)
        return torch.where(self.is_flat(std), 0.0, (std + eps).reciprocal())

    def scaled(self, ddof: int, eps: float) -> Float[Tensor, "..."]:
        """The deviations in units of (std + eps), exactly 0 throughout a flat pool."""
        return self.value * self.pools.rows(self.over_std(ddof, eps))

    def flattened(self) -> Float[Tensor, "..."]:
        """The deviations, exactly 0 throughout a flat pool."""
        return torch.where(self.pools.rows(self.is_flat(self.std(0))), 0.0, self.value)

    def sizes(self) -> Float[Tensor, "..."]:
        """Of every row, how many live rows its pool has."""
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
    """Deviations from each pool's mean, in float32 at least and detached; 0 where a row is not live.

    With `weights` (lengths, say) a row counts that many times, in the mean and in the squares.
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
    """What a group of one gets: 0, having no baseline, or with "raw" its own reward, as in verl's loops."""
    if singleton == "raw":
        advantages = torch.where(group.sizes() == 1, at_least_float32(raw).detach(), advantages)
    elif singleton != "zero":
        raise ValueError(f"singleton is {singleton!r}; known: 'zero', 'raw'")
    return group.pools.keep(advantages)


def batch_normalised(
    x: Float[Tensor, "..."],
    live: Bool[Tensor, "..."] | None,
    weights: Shaped[Tensor, "..."] | None = None,
    *,
    eps: float = 0.0,
    variance_eps: float = 1e-8,
) -> Float[Tensor, "..."]:
    """Whitening: (x - mean) / (sqrt(var + variance_eps) + eps), with the batch's mean and sample variance."""
    batch = deviations(x, Pools(None, live), weights)
    std = batch.std(1)
    scale = ((std.square() + variance_eps).sqrt() + eps).reciprocal()
    return batch.value * torch.where(batch.is_flat(std), 0.0, scale)
