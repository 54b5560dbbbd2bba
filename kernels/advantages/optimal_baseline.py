"""Advantages whose baseline of each token is the one of least variance, by the gradient's norm so far."""

from typing import Literal

import torch

from composer_plugins.kernels.advantages.whitened import discounted_returns
from composer_plugins.kernels.groups import Pools, Singleton, dense, deviations
from composer_plugins.kernels.masking import at_least_float32, keep, with_nan_of
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.types import GroupIds, Mask, Tokens

__all__ = ["optimal_token_baseline", "tir_optimal_token_baseline"]


def optimal_token_baseline(
    token_rewards: Tokens,
    old_logprobs: Tokens,
    sum_pi_squared: Tokens,
    group_ids: GroupIds,
    mask: Mask,
    *,
    correction_weights: Tokens | None = None,
    by: Literal["position", "token"] = "position",
    alone: Singleton = "zero",
    eps: float = 0.0,
    num_groups: int | None = None,
) -> Tokens:
    """OTB: A_t = G_t - B_t, where the baseline weighs each rollout by the norm of its gradient up to token t.

        w_t = (1 - 2 pi_t + sum_v pi_v^2) c_t^2,    W_t = sum_{u <= t} w_u
        G_t = sum_{u >= t} r_u,    B_t = sum_j W_jt G_jt / (sum_j W_jt + eps),   j over the group

    The bracket is the squared norm of the gradient of log pi(y_t) in the logits; pi is the old policy, and c
    a weight of a rollout correction (`correction_weights`; 1 where not given). Rollouts are compared at the
    same position of the padded batch, or with by="token" at the same count of unmasked tokens. Where only
    one rollout of the group has a token there is no baseline: 0, or with alone="raw" G_t, as in verl. Where
    all weights are 0, because every token so far was certain, the baseline is the plain mean.
    Departs from verl: (1) by="position" and a mask with holes: verl leaves the baseline out from the position
    on that equals the second largest count of tokens; here where no other rollout has a token.
    Source: arXiv 2602.07078; verl 0.9.1 compute_optimal_token_baseline_advantage.
    Raises ValueError for an unknown `by` or `alone`.
    """
    pi = keep(at_least_float32(old_logprobs).detach(), mask).exp()
    w = 1 - 2 * pi + at_least_float32(sum_pi_squared).detach()
    w = with_nan_of(w, keep(at_least_float32(old_logprobs).detach(), mask))
    if correction_weights is not None:
        w = w * at_least_float32(correction_weights).detach().square()
    w_so_far = keep(keep(w, mask).cumsum(-1), mask)
    returns = discounted_returns(token_rewards, mask)

    tokens = mask.shape[-1]
    if by == "position":
        place = torch.arange(tokens, device=mask.device).expand(mask.shape)
    elif by == "token":
        place = (mask.cumsum(-1) - 1).clamp(min=0)
    else:
        raise ValueError(f"by is {by!r}; known: 'position', 'token'")
    slots = None if num_groups is None else num_groups * tokens
    slot = dense(group_ids, num_groups).unsqueeze(-1) * tokens + place
    pools = Pools(slot.flatten(), mask.flatten(), slots)
    # G - B by the deviations D of G from its mean: D - sum_j W_j D_j / (sum_j W_j + eps) + what eps leaves of
    # the mean. Equal returns then have no advantage at all.
    group = deviations(returns.flatten(), pools)
    d, weight = group.flattened(), pools.sum(w_so_far.flatten()) + eps
    weight = torch.where(weight == 0, 1.0, weight)
    baseline = pools.sum(w_so_far.flatten() * d) / weight - group.mean * (eps / weight)
    advantages = (d - pools.rows(baseline)).view(mask.shape)
    is_alone = (group.sizes() == 1).view(mask.shape)
    if alone == "raw":
        advantages = torch.where(is_alone, with_nan_of(returns, advantages), advantages)
    elif alone == "zero":
        advantages = torch.where(is_alone, advantages - advantages, advantages)  # NaN stays NaN
    else:
        raise ValueError(f"alone is {alone!r}; known: 'zero', 'raw'")
    return keep(advantages, mask)


tir_optimal_token_baseline = preset(
    optimal_token_baseline,
    "tir_optimal_token_baseline",
    """OTB for tools: rollouts are compared at the same count of unmasked tokens, with tool output left out.

    Source: arXiv 2602.07078; verl 0.9.1 compute_multi_turn_optimal_token_baseline_advantage.
    """,
    without=("by",),
    by="token",
)
