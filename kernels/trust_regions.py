"""How far a policy may move from its anchor before a token stops pushing: clips and masks.

All of them work per token and know nothing of padding: the caller masks. A mask here answers "does
this token still push", as a detached boolean; a positive advantage is bounded above, any other below.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Inside the logarithm of 1 - p, which is exactly 0 in float32 for p above 1 - 6e-8 (verl, Stable-RL).
COMPLEMENT_EPS = 1e-8


def clipped_surrogate(
    ratio: Float[Tensor, "*batch #tokens"],
    advantages: Float[Tensor, "*#batch #tokens"],
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "*batch tokens"]:
    """PPO's pessimistic bound, as a loss: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    `ratio_cap` bounds r in the unclipped branch only (TRL's `delta`, INTELLECT-2's two-sided clip);
    `dual_clip` bounds the loss by -A * dual_clip where A < 0 (arXiv 1912.09729).
    """
    unclipped = -advantages * (ratio if ratio_cap is None else ratio.clamp(max=ratio_cap))
    loss = torch.maximum(unclipped, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def tv_mask(
    probs: Float[Tensor, "*batch tokens"],
    anchor_probs: Float[Tensor, "*batch tokens"],
    advantages: Float[Tensor, "*#batch #tokens"],
    *,
    low: float,
    high: float,
) -> Bool[Tensor, "*batch tokens"]:
    """DPPO-Binary-TV: keep a token while p - q <= high (A > 0) or p - q >= -low (otherwise)."""
    shift = (probs - anchor_probs).detach()
    return torch.where(advantages > 0, shift <= high, shift >= -low)


def binary_kl_mask(
    logprobs: Float[Tensor, "*batch tokens"],
    anchor_logprobs: Float[Tensor, "*batch tokens"],
    advantages: Float[Tensor, "*#batch #tokens"],
    *,
    low: float,
    high: float,
) -> Bool[Tensor, "*batch tokens"]:
    """DPPO-Binary-KL: keep a token while KL(Bernoulli(q) || Bernoulli(p)) is small, or p moves back.

    KL = q (log q - log p) + (1 - q) log((1 - q) / (1 - p)), in nats; p <= q never leaves the region
    upwards, p >= q never downwards.
    """
    log_p, log_q = logprobs.detach(), anchor_logprobs.detach()
    p, q = log_p.exp(), log_q.exp()
    complement = torch.log((1 - q + COMPLEMENT_EPS) / (1 - p + COMPLEMENT_EPS))
    kl = q * (log_q - log_p) + (1 - q) * complement
    return torch.where(advantages > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
