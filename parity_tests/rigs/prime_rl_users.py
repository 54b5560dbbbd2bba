"""A loss of a user's own, which PRIME-RL calls by its import path."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.kernels.types import Metric, TokenLoss

USERS = {"policy": f"{__name__}:users_loss", "policy_params": {"cap": 1.5}}


def users_loss(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, rollout_logprobs: Tensor | None = None, cap: float
) -> TokenLoss:
    """A loss of a user's own, named by import path: REINFORCE with a capped ratio."""
    assert rollout_logprobs is not None, "an optional input that PRIME-RL has is passed"
    ratio = torch.where(mask, logprobs.detach() - rollout_logprobs, 0.0).exp()
    loss = torch.where(mask, -ratio.clamp(max=cap) * advantages * logprobs, 0.0)
    return TokenLoss(loss, {"capped_frac": Metric(ratio > cap, mask)})


def unfed(logprobs: Any, student_logits: Any, mask: Any) -> Any:
    """A loss that needs logits, which PRIME-RL does not have."""


def unmasked(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> TokenLoss:
    """A loss that forgets the mask."""
    return TokenLoss(-advantages * (logprobs - rollout_logprobs).exp(), {})


def reports_a_clip(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, low: float = 0.25) -> TokenLoss:
    """A loss with one of the two metrics of a clip, and as a number."""
    loss = torch.where(mask, -advantages * logprobs, 0.0)
    return TokenLoss(loss, {"clip_frac_low": Metric(torch.full_like(logprobs, low).detach(), mask)})
