"""Group-relative advantages: how much better a rollout did than the others of its prompt.

`rewards` is [rows], one per rollout, and `group_ids` says which rows share a prompt, in any order and
of any size. `mask` leaves rows out (unscorable rollouts): they count nowhere and get 0. Everything is
vectorised, without a host sync; the number of groups is never read back.

Advantages are per sequence: `unsqueeze(-1)` makes them broadcast over tokens. They carry no gradient.
A group whose rewards are all equal gets exactly 0: deviations are taken from the group's minimum, and
a standard deviation below one rounding unit of the largest reward counts as none.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep

Rewards = Float[Tensor, " rows"]
GroupIds = Int[Tensor, " rows"]
RowMask = Bool[Tensor, " rows"]


def grpo(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    scale: Literal["group", "batch"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
) -> Rewards:
    """GRPO: A_i = (R_i - mean_group) / (std + eps).

    `scale="batch"` divides by the standard deviation of the whole batch's rewards (TRL, REINFORCE++).
    `ddof=1` is torch's sample deviation, as in verl, TRL and OpenRLHF; open-instruct uses 0.
    eps: verl 1e-6, TRL 1e-4, r1-zero 1e-8. A group of one row has no baseline: 0, or with
    `singleton="raw"` R / (1 + eps), which is what verl's loop does.
    Source: arXiv 2402.03300 section 4.1.2; verl 0.9.1 compute_grpo_outcome_advantage; TRL 1.16
    grpo_trainer.py _generate_and_score_completions.
    """
    group = _group(rewards, group_ids, mask)
    if scale == "group":
        std = group.std(ddof)
    elif scale == "batch":
        std = _group(rewards, torch.zeros_like(group_ids), mask).std(ddof)
    else:
        raise ValueError(f"scale is {scale!r}; known: 'group', 'batch' (without a scale: dr_grpo)")
    # Where std is 0 the deviation is rounding noise, and a small eps would blow it up.
    scaled = torch.where(std == 0, 0.0, group.deviation / (std + eps))
    return _with_singletons(scaled, group, rewards / (1 + eps), singleton)


def dr_grpo(rewards: Rewards, group_ids: GroupIds, mask: RowMask | None = None) -> Rewards:
    """Dr. GRPO: A_i = R_i - mean_group; without the std, which favours too easy and too hard prompts.

    Source: arXiv 2503.20783; sail-sg/understand-r1-zero train_zero_math.py@dfca49d. Also PRIME-RL's grpo.
    """
    group = _group(rewards, group_ids, mask)
    return keep(torch.where(group.std(0) == 0, 0.0, group.deviation), group.live)


def rloo(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    singleton: Literal["zero", "raw"] = "zero",
) -> Rewards:
    """RLOO: A_i = R_i - mean of the *other* rewards of the group = (R_i - mean_group) n / (n - 1).

    A group of one row gets 0 (verl's vectorised version) or, with `singleton="raw"`, R (verl's loop).
    Source: arXiv 2402.14740; verl 0.9.1 compute_rloo_outcome_advantage.
    """
    group = _group(rewards, group_ids, mask)
    n = group.size
    left_out = torch.where(group.std(0) == 0, 0.0, group.deviation * n / (n - 1).clamp(min=1))
    return _with_singletons(left_out, group, rewards, singleton)


class _Group(NamedTuple):
    """Of every row: its group's size, its deviation from the group's mean, and what a std needs."""

    size: Float[Tensor, " rows"]
    deviation: Float[Tensor, " rows"]
    squares: Float[Tensor, " rows"]
    rounding: Float[Tensor, " rows"]
    live: RowMask

    def std(self, ddof: int) -> Float[Tensor, " rows"]:
        """The group's standard deviation, exactly 0 where it is rounding noise or n <= ddof."""
        std = (self.squares / (self.size - ddof).clamp(min=1)).sqrt()
        is_noise = (std <= self.rounding) | (self.size <= ddof)
        return torch.where(is_noise, 0.0, std)


def _group(rewards: Rewards, group_ids: GroupIds, mask: RowMask | None) -> _Group:
    live = torch.ones_like(group_ids, dtype=torch.bool) if mask is None else mask
    r = at_least_float32(rewards).detach()
    index = _dense(group_ids)

    def total(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index, keep(x, live))[index]

    def extreme(x: Tensor, reduce: Literal["amin", "amax"], start: float) -> Tensor:
        slots = torch.full_like(x, start)
        return slots.scatter_reduce(0, index, torch.where(live, x, start), reduce)[index]

    count = total(torch.ones_like(r))
    # Equal rewards are exactly 0 away from their minimum, whatever their magnitude; their mean, rounded,
    # need not equal them (eight times 0.1 in float32).
    above = keep(r - extreme(r, "amin", float("inf")), live)
    deviation = keep(above - total(above) / count.clamp(min=1), live)
    largest = extreme(r.abs(), "amax", 0.0)
    rounding = torch.finfo(r.dtype).eps * largest
    return _Group(count, deviation, total(deviation.square()), rounding, live)


def _dense(group_ids: GroupIds) -> Int[Tensor, " rows"]:
    """Group ids renumbered 0, 1, 2 ... by size of id: a sort, because `unique` would sync the host."""
    order = torch.argsort(group_ids, stable=True)
    ranked = group_ids[order]
    ranks = torch.zeros_like(ranked)
    ranks[1:] = (ranked[1:] != ranked[:-1]).cumsum(0)
    return torch.empty_like(ranks).scatter(0, order, ranks)


def _with_singletons(
    advantages: Rewards, group: _Group, raw: Rewards, singleton: Literal["zero", "raw"]
) -> Rewards:
    if singleton == "raw":
        advantages = torch.where(group.size == 1, at_least_float32(raw).detach(), advantages)
    elif singleton != "zero":
        raise ValueError(f"singleton is {singleton!r}; known: 'zero', 'raw'")
    return keep(advantages, group.live)
