"""Group-relative advantages: how much better a rollout did than the others of its prompt.

`rewards` is [rows], one per rollout. `group_ids` says which rows share a prompt; groups may have any size
and their rows any order. `mask` leaves rows out (rollouts without a reward): they count nowhere and get 0.
Ids are any integers. If they are already 0 .. num_groups - 1, pass `num_groups` to save a sort; an id
beyond is then an index error, on a GPU a device assertion.

Advantages are per sequence: `unsqueeze(-1)` makes them broadcast over tokens. They carry no gradient.
A group whose rewards are all equal gets exactly 0: a standard deviation within one rounding unit of the
mean counts as none. This holds while the sum of the rewards and their squared differences neither
overflow nor underflow. A NaN reward of an unmasked row makes its whole group NaN and no other group,
except under `grpo`'s scale="batch", where every row becomes NaN.
"""

from typing import Literal

import torch

from composer_plugins.kernels.groups import Pools, Singleton, deviations, grouped, with_singletons
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.types import GroupIds, Lengths, Rewards, RowMask

__all__ = ["dr_grpo", "gpg", "grpo", "grpo_leave_one_out", "maxrl", "opo", "pass_at_k", "rloo"]


def grpo(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """GRPO: A_i = (R_i - mean_group) / (std + eps).

    `scale="batch"` divides by the standard deviation of the whole batch's rewards, "none" by nothing.
    `ddof=1` is torch's sample deviation, as in verl, TRL and OpenRLHF; open-instruct uses 0.
    eps: verl and slime 1e-6, TRL 1e-4, r1-zero 1e-8, OpenRLHF 1e-9. A group of one row has no baseline: 0,
    or with `singleton="raw"` R / (1 + eps), which is what verl's loop does (R without a scale). OpenRLHF,
    slime and r1-zero give NaN there, because the sample deviation of one reward is 0 / 0.
    Source: arXiv 2402.03300 section 4.1.2; verl 0.9.1 compute_grpo_outcome_advantage; TRL 1.16
    grpo_trainer.py _generate_and_score_completions.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    if scale == "none":
        return with_singletons(group.flattened(), group, rewards, singleton)
    if scale == "group":
        scaled = group.scaled(ddof, eps)
    elif scale == "batch":
        scaled = group.value * deviations(rewards, Pools(None, mask)).over_std(ddof, eps)
    else:
        raise ValueError(f"scale is {scale!r}; known: 'group', 'batch', 'none'")
    return with_singletons(scaled, group, at_least_float32(rewards) / (1 + eps), singleton)


dr_grpo = preset(
    grpo,
    "dr_grpo",
    """Dr. GRPO: A_i = R_i - mean_group; without the std, which favours too easy and too hard prompts.

    Source: arXiv 2503.20783; sail-sg/understand-r1-zero train_zero_math.py@dfca49d. Also PRIME-RL's grpo.
    """,
    without=("scale", "ddof", "eps"),
    scale="none",
)


def rloo(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """RLOO: A_i = R_i - mean of the *other* rewards of the group = (R_i - mean_group) n / (n - 1).

    A group of one row gets 0 (verl's vectorised version) or, with `singleton="raw"`, R (verl's loop).
    Source: arXiv 2402.14740; verl 0.9.1 compute_rloo_outcome_advantage.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    left_out = group.flattened() * group.pools.rows(group.size / (group.size - 1).clamp(min=1))
    return with_singletons(left_out, group, rewards, singleton)


def grpo_leave_one_out(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    eps: float = 1e-6,
    num_groups: int | None = None,
) -> Rewards:
    """GRPO whose mean and standard deviation leave the rollout itself out: NeMo-RL's default.

        A_i = (R_i - m_i) / (s_i + eps),   m_i, s_i: mean and sample deviation of the group's other rewards

    Where the other rewards are all equal, or there is one, A_i = R_i - m_i. A group of one row gets 0.
    Departs from NeMo-RL: (1) a deviation that is only rounding counts as none; there it divides.
    Source: NVIDIA-NeMo/RL nemo_rl/algorithms/advantage_estimator.py@7ea279a GRPOAdvantageEstimator with
    normalize_rewards and use_leave_one_out_baseline.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    own, n, squares = group.flattened(), group.sizes(), group.pools.rows(group.squares)
    left_out = own * n / (n - 1).clamp(min=1)  # R_i - m_i
    of_others = squares - own * left_out  # the squares of the others around their own mean
    std = (of_others.clamp(min=0) / (n - 2).clamp(min=1)).sqrt()
    is_rounding = of_others <= 4 * torch.finfo(squares.dtype).eps * n * squares
    return group.pools.keep(torch.where(is_rounding | (n <= 2), left_out, left_out / (std + eps)))


def maxrl(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    eps: float = 0.0,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """MaxRL: A_i = (R_i - mean_group) / (mean_group + eps), and 0 where the group's mean is not above 0.

    Dividing by the success rate weights hard prompts as the gradient of log success does: with rewards
    of 0 and 1 it averages the score over the successes alone. A group of one gets 0, or with
    `singleton="raw"` R. SkyRL has eps 1e-6 and "raw".
    Departs from SkyRL: (1) where the mean is not above 0, SkyRL divides by it all the same.
    Source: arXiv 2602.02710; PRIME-RL@559b447 max_rl; skyrl 0.3.0 ppo_utils.py compute_maxrl_advantage.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    mean = group.pools.rows(torch.where(group.mean <= 0, torch.inf, group.mean)) + eps
    return with_singletons(group.pools.keep(group.flattened() / mean), group, rewards, singleton)


def opo(
    rewards: Rewards,
    group_ids: GroupIds,
    lengths: Lengths,
    mask: RowMask | None = None,
    *,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """OPO: A_i = R_i - sum_j |y_j| R_j / sum_j |y_j|, the baseline of least variance.

    It assumes that the squared norm of a sequence's gradient grows with its length. `lengths` counts
    unmasked tokens; where a whole group has none, its baseline is the plain mean.
    Source: arXiv 2505.23585; verl 0.9.1 compute_opo_outcome_advantage.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    equal = group.flattened()
    lengths = lengths.to(group.value.dtype)
    weight = group.pools.sum(lengths)
    baseline = group.pools.sum(lengths * equal) / torch.where(weight == 0, 1.0, weight)
    return with_singletons(equal - group.pools.rows(baseline), group, rewards, singleton)


def gpg(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    f_norm: float = 1.0,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """GPG: A_i = alpha (R_i - mean_group) / f_norm, with alpha = rows of the batch / rows with R != 0.

    alpha makes up for groups without a signal; a batch of zeros gets 0. alpha is one number for the whole
    batch: compute the advantages before you cut a batch into micro-batches.
    Source: arXiv 2504.02546; verl 0.9.1 compute_gpg_outcome_advantage. alpha counts rewards, as in verl. The
    authors' code (AMAP-ML/GPG@e096da8) counts the groups whose rewards differ.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    batch, r = Pools(None, mask), at_least_float32(rewards).detach()
    alpha = batch.sum(torch.ones_like(r)) / batch.sum((r != 0).to(r.dtype)).clamp(min=1)
    scaled = group.flattened() * (alpha / f_norm)
    return with_singletons(scaled, group, r * (alpha / f_norm), singleton)


def pass_at_k(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    scale: Literal["group", "none"] = "none",
    ddof: int = 1,
    eps: float = 1e-6,
    num_groups: int | None = None,
) -> Rewards:
    """Pass@k: only the best of a group has an advantage, by how much it beats the second best.

        A_i = R_(1) - R_(2) for the best row, 0 for the others; with scale="group" over (std + eps)

    Two rows that share the best reward get 0. So does a group of one row, for which verl raises an error.
    Source: arXiv 2503.19595; verl 0.9.1 compute_grpo_passk_outcome_advantage (scaled by default).
    """
    pools = grouped(group_ids, mask, num_groups)
    group = deviations(rewards, pools)
    best = pools.max(group.value)
    is_best = group.value == pools.rows(best)
    second = pools.max(torch.where(is_best, -torch.inf, group.value))
    ties = pools.sum(is_best.to(group.value.dtype))
    # A group of one has no second best. `is_best` is False for a NaN, which must reach the result.
    lead = torch.where((ties == 1) & (group.size > 1), best - second, 0.0)
    lead = torch.where(group.mean.isfinite(), lead, torch.nan)
    if scale == "group":
        lead = lead * group.over_std(ddof, eps)
    elif scale == "none":
        lead = torch.where(group.is_flat(group.std(0)), 0.0, lead)
    else:
        raise ValueError(f"scale is {scale!r}; known: 'group', 'none'")
    return pools.keep(torch.where(is_best | group.value.isnan(), pools.rows(lead), 0.0))
