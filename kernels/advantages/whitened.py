"""Advantages normalised over the batch, and those with a reward or a value per token.

Where `lengths` are given, whitening counts a row once per unmasked token, as frameworks do that repeat
a row's advantage over its tokens. All need the whole batch: normalise before you cut it.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.advantages.scans import next_unmasked, reverse_scan
from composer_plugins.kernels.groups import (
    Pools,
    Singleton,
    batch_normalised,
    dense,
    deviations,
    grouped,
    with_singletons,
)
from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import GroupIds, Lengths, Mask, Rewards, RowMask, Tokens

__all__ = [
    "discounted_returns",
    "gae",
    "gdpo",
    "length_adaptive_gae",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
]


def reinforce_pp(
    token_rewards: Tokens, mask: Mask, *, gamma: float = 1.0, variance_eps: float = 1e-8
) -> Tokens:
    """REINFORCE++: the discounted return from each token on, whitened over the batch's unmasked tokens.

        G_t = r_t + gamma G_(next unmasked token),    A_t = (G_t - mean) / sqrt(var + variance_eps)

    Masked tokens (a tool's output) are skipped: they neither discount nor have a reward.
    Departs from verl: (1) a batch of one token, or of equal returns, gets 0; verl raises an error,
    or divides rounding noise.
    Source: arXiv 2501.03262; verl 0.9.1 compute_reinforce_plus_plus_outcome_advantage.
    """
    return batch_normalised(
        discounted_returns(token_rewards, mask, gamma=gamma), mask, variance_eps=variance_eps
    )


def reinforce_pp_baseline(
    rewards: Rewards,
    group_ids: GroupIds,
    lengths: Lengths | None = None,
    mask: RowMask | None = None,
    *,
    variance_eps: float = 1e-8,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """REINFORCE++-baseline: R_i - mean_group, then whitened over the batch (`reinforce_pp`).

    With `lengths` a row counts once per unmasked token, as in verl and OpenRLHF; without, once.
    Source: arXiv 2501.03262; verl 0.9.1 compute_reinforce_plus_plus_baseline_outcome_advantage.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    centred = with_singletons(group.flattened(), group, rewards, singleton)
    return batch_normalised(centred, mask, lengths, variance_eps=variance_eps)


def gdpo(
    reward_components: Float[Tensor, "rows components"],
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    lengths: Lengths | None = None,
    component_weights: Float[Tensor, " components"] | None = None,
    component_mask: Bool[Tensor, "rows components"] | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
    batch_eps: float = 1e-4,
    variance_eps: float = 0.0,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """GDPO: every reward is normalised in its group by itself, then their weighted sum over the batch.

        a_ik = (R_ik - mean_group) / (std_group + eps),    s_i = sum_k w_k a_ik
        A_i  = (s_i - mean_batch) / (sqrt(var_batch + variance_eps) + batch_eps)

    A reward of wide spread does not dominate the others. `component_mask` leaves single rewards out (of
    a function that could not score a row): they count nowhere and add 0; a row without any gets 0. With
    `lengths` the batch's mean and variance count a row once per unmasked token, as verl does.
    Source: arXiv 2601.05242; TRL 1.16 grpo_trainer.py, multi_objective_aggregation="normalize_then_sum";
    verl 0.9.1 compute_gdpo_outcome_advantage.
    """
    r = at_least_float32(reward_components).detach()
    kept = torch.ones_like(r, dtype=torch.bool) if mask is None else mask.unsqueeze(1).expand(r.shape)
    kept = kept if component_mask is None else kept & component_mask
    # Every (group, component) is a pool of its own, and there are as many slots as entries.
    width = r.shape[1]
    slot = dense(group_ids, num_groups).unsqueeze(1) * width + torch.arange(width, device=r.device)
    slots = None if num_groups is None else num_groups * width
    group = deviations(r.flatten(), Pools(slot.flatten(), kept.flatten(), slots))
    normal = group.scaled(ddof, eps)
    normal = with_singletons(normal, group, r.flatten() / (1 + eps), singleton).view(r.shape)
    weighted = normal if component_weights is None else normal * component_weights
    return batch_normalised(
        weighted.sum(1),
        kept.any(1),
        lengths,
        eps=batch_eps,
        variance_eps=variance_eps,
    )


def remax(token_rewards: Tokens, baselines: Float[Tensor, "*batch"], mask: Mask) -> Tokens:
    """ReMax: A_t = (sum of the rewards from token t on) - reward of the greedy completion.

    Source: arXiv 2310.10505; verl 0.9.1 compute_remax_outcome_advantage.
    """
    baseline = at_least_float32(baselines).detach().unsqueeze(-1)
    return keep(discounted_returns(token_rewards, mask) - baseline, mask)


def gae(
    token_rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    variance_eps: float = 1e-8,
) -> Tokens:
    """Generalized advantage estimation: A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t.

    "next" is the next unmasked token, and after the last one V and A are 0. With `whiten`, whitened over the
    batch's unmasked tokens; the critic's targets are `gae(..., whiten=False) + values`.
    Source: arXiv 1506.02438; verl 0.9.1 compute_gae_advantage_return (lam 1.0).
    """
    v = keep(at_least_float32(values).detach(), mask)
    delta = at_least_float32(token_rewards).detach() + gamma * next_unmasked(v, mask) - v
    advantages = keep(reverse_scan(keep(delta, mask), _decay(delta, mask, gamma * lam)), mask)
    return batch_normalised(advantages, mask, variance_eps=variance_eps) if whiten else advantages


def length_adaptive_gae(
    token_rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
    whiten: bool = True,
    variance_eps: float = 1e-8,
) -> Tokens:
    """VAPO's GAE: lambda grows with the number l of unmasked tokens of a row.

        A_t = delta_t + gamma lam A_next,   delta_t = r_t + gamma V_next - V_t,   lam = 1 - 1 / (alpha l)

    lam is 0 where alpha l is below 1. The rest is as in `gae`. The targets of VAPO's critic have lam = 1:
    `gae(..., lam=1.0, whiten=False) + values`.
    Source: arXiv 2504.05118; NVIDIA-NeMo/RL nemo_rl/algorithms/advantage_estimator.py@7ea279a
    GeneralizedAdvantageEstimator, length_adaptive_alpha.
    """
    v = keep(at_least_float32(values).detach(), mask)
    delta = at_least_float32(token_rewards).detach() + gamma * next_unmasked(v, mask) - v
    horizon = (alpha * mask.sum(-1, keepdim=True).to(v.dtype)).clamp(min=1)
    decay = torch.where(mask, gamma * (1 - 1 / horizon), torch.ones_like(v))
    advantages = keep(reverse_scan(keep(delta, mask), decay), mask)
    return batch_normalised(advantages, mask, variance_eps=variance_eps) if whiten else advantages


def discounted_returns(token_rewards: Tokens, mask: Mask, *, gamma: float = 1.0) -> Tokens:
    """G_t = r_t + gamma G_next over the unmasked tokens, 0 elsewhere."""
    r = keep(at_least_float32(token_rewards).detach(), mask)
    return keep(reverse_scan(r, _decay(r, mask, gamma)), mask)


def _decay(like: Tokens, mask: Mask, gamma: float) -> Tokens:
    """gamma at unmasked tokens, 1 elsewhere; `torch.where` would round a number to float32."""
    return torch.ones_like(like).masked_fill(mask, gamma)
