"""Masks that bound how far the policy moves from the old or the rollout policy, and the distances they use.

All of them work per token and ignore padding: the caller masks. A mask here is a detached boolean, True
where a token keeps its gradient. The bound is an upper one where A > 0, and a lower one elsewhere.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.types import Advantages, LogProbs, Mask, Tokens

# Inside the logarithm of 1 - p, which is exactly 0 in float32 for p above 1 - 6e-8 (verl, Stable-RL).
COMPLEMENT_EPS = 1e-8
# Least probability beyond the top k; rounding would make it 0 or less (Stable-RL).
REST_MIN = 1e-12


def tv_mask(
    probs: Tokens,
    rollout_probs: Tokens,
    advantages: Advantages,
    *,
    low: float,
    high: float,
) -> Mask:
    """DPPO-Binary-TV: keep a token while p - q <= high (A > 0) or p - q >= -low (otherwise)."""
    shift = (probs - rollout_probs).detach()
    return torch.where(advantages > 0, shift <= high, shift >= -low)


def binary_kl(logprobs: Tokens, rollout_logprobs: Tokens) -> Tokens:
    """DPPO-Binary-KL's distance, KL(Bernoulli(q) || Bernoulli(p)) in nats; q is the rollout's.

        KL = q (log q - log p) + (1 - q) log((1 - q) / (1 - p))

    0 log 0 = 0. A probability above 1 by rounding has a complement of 0.
    """
    log_p, log_q = logprobs.detach(), rollout_logprobs.detach()
    q = log_q.exp()
    rest_p, rest_q = (1 - log_p.exp()).clamp(min=0), (1 - q).clamp(min=0)
    complement = torch.log((rest_q + COMPLEMENT_EPS) / (rest_p + COMPLEMENT_EPS))
    return torch.where(q == 0, 0.0, q * (log_q - log_p)) + rest_q * complement


def distance_mask(
    distance: Tokens,
    probs: Tokens,
    rollout_probs: Tokens,
    advantages: Advantages,
    *,
    low: float,
    high: float,
) -> Mask:
    """Keep a token while an unsigned distance is small, or while its probability moves back towards q.

    distance <= high or p <= q where A > 0, distance <= low or p >= q otherwise.
    """
    p, q = probs.detach(), rollout_probs.detach()
    upwards, downwards = (distance <= high) | (p <= q), (distance <= low) | (p >= q)
    return torch.where(advantages > 0, upwards, downwards)


def ratio_mask(
    ratio: Tokens,
    advantages: Advantages,
    *,
    low: float,
    high: float,
) -> Mask:
    """PPO's clip as a mask: keep a token while r <= 1 + high (A > 0) or r >= 1 - low (otherwise)."""
    r = ratio.detach()
    return torch.where(advantages > 0, r <= 1 + high, r >= 1 - low)


def rest_bucket_tv(logprobs: LogProbs, rollout_logprobs: LogProbs) -> Tokens:
    """Total variation of two distributions known at k entries: the rest of each is one more bucket."""
    p, q = logprobs.detach().exp(), rollout_logprobs.detach().exp()
    return ((p - q).abs().sum(-1) + (rest(p) - rest(q)).abs()) / 2


def rest_bucket_kl(logprobs: LogProbs, rollout_logprobs: LogProbs) -> Tokens:
    """KL(Q || P) in nats over the same k + 1 buckets; Q is the rollout policy."""
    log_p, log_q = logprobs.detach(), rollout_logprobs.detach()
    p, q = log_p.exp(), log_q.exp()
    explicit = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)  # 0 log 0 = 0
    return explicit + rest(q) * (rest(q).log() - rest(p).log())


def rest(probs: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """The probability beyond the k entries, at least REST_MIN."""
    return (1 - probs.sum(-1)).clamp(min=REST_MIN)
