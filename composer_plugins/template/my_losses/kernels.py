"""A policy loss, a preference loss and an advantage: tensors in, one number per token, pair or row out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_plugins.kernels.groups import deviations, grouped
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.policy.parts import score
from composer_plugins.kernels.ratios import importance_weight
from composer_plugins.kernels.types import Metric, PairLoss, TokenLoss


def half_negative(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, scale: float = 0.5
) -> TokenLoss:
    """REINFORCE with an importance weight, in which a negative advantage counts `scale` times.

    -sg(w_t) A' log pi(y_t), with w_t = pi / pi_old and A' = scale * A where A < 0. All tensors are
    [*batch, tokens]; the mask is True where a token counts. The loss is in nats, one per token.
    """
    weight = importance_weight(logprobs, old_logprobs)  # detached; it cannot overflow
    scaled = torch.where(advantages < 0, scale * advantages, advantages)
    loss = score(weight, scaled, logprobs, mask)  # -weight A log pi, exactly 0 where masked
    return TokenLoss(loss, {"ratio": Metric(weight, mask)})


def logistic_margin(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> PairLoss:
    """-log sigmoid(beta (chosen - rejected) - margin), one loss per pair; scores are [pairs], in nats."""
    difference = at_least_float32(chosen) - at_least_float32(rejected)
    return PairLoss(-F.logsigmoid(beta * difference - margin), {})


def absolute_deviation(
    rewards: Tensor, group_ids: Tensor, mask: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """A_i = (R_i - mean_group) / (mean absolute deviation + eps), [rows]; 0 in a group of equal rewards."""
    group = deviations(rewards, grouped(group_ids, mask))
    deviation = group.pools.sum(group.value.abs()) / group.size.clamp(min=1)
    return group.flattened() / (group.pools.rows(deviation) + eps)
