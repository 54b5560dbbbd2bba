"""Random batches and rollouts as the trainers of verl and SkyRL have them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.testing.draws import Draw, flag, generator

FLOAT64 = torch.float64

# In nats: on-policy, one step away, stale, and beyond every clamp that verl has.
SPREADS = (0.0, 0.01, 0.3, 3.0, 30.0)


class Batch(NamedTuple):
    """What a policy loss is called with; what is masked is an ordinary number, verl multiplies by 0."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None  # of a rollout correction


class Rollouts(NamedTuple):
    """What an advantage estimator is called with: one reward per row, at some token of it."""

    rewards: Tensor
    token_rewards: Tensor
    ids: Tensor
    mask: Tensor


def rows_and_tokens(draw: Draw, max_rows: int = 5, max_tokens: int = 7) -> tuple[int, int]:
    """The size of a batch, one row and one token included."""
    return draw.integer(1, max_rows, "rows"), draw.integer(1, max_tokens, "tokens")


def draw_mask(draw: Draw, g: torch.Generator, rows: int, tokens: int) -> Tensor:
    """Unmasked tokens with holes and empty rows, or every row a prefix; at least one is unmasked."""
    kind = draw.choose(["all", "holes", "sparse", "prefixes"], "mask")
    if kind == "prefixes":
        lengths = torch.randint(0, tokens + 1, (rows, 1), generator=g)
        mask = torch.arange(tokens) < lengths
    else:
        unmasked = {"all": 1.0, "holes": 0.7, "sparse": 0.2}[kind]
        mask = torch.rand(rows, tokens, generator=g) < unmasked
    if not mask.any():
        mask[-1, 0] = True  # of a batch without an unmasked token verl has no loss: a test of its own
    return mask


def policy_batch(draw: Draw) -> Batch:
    """Log-probabilities at any distance, advantages per token or per row, ties and zeros among them."""
    g = generator(draw)
    rows, tokens = rows_and_tokens(draw)
    spread = draw.choose(SPREADS, "log-ratio spread")
    shape = (rows, tokens)
    noise = spread * torch.randn(shape, generator=g, dtype=FLOAT64)
    logprobs = -4 * torch.rand(shape, generator=g, dtype=FLOAT64) - noise.clamp(min=0)
    advantages = torch.randint(-3, 4, shape, generator=g).to(FLOAT64) / 10
    if flag(draw, "advantages without ties"):
        advantages += torch.randn(shape, generator=g, dtype=FLOAT64)
    if flag(draw, "one advantage per row"):
        advantages = advantages[:, :1].expand(shape).clone()
    weights = None
    if flag(draw, "rollout correction"):
        weights = 2 * torch.rand(shape, generator=g, dtype=FLOAT64)
    return Batch(logprobs, logprobs + noise, advantages, draw_mask(draw, g, rows, tokens), weights)


def global_batch(draw: Draw, mask: Tensor) -> dict[str, Any]:
    """What verl passes in addition to the mode: nothing, or the counts of the whole batch over ranks."""
    info: dict[str, Any] = {}
    if flag(draw, "a part of a larger batch"):
        info["dp_size"] = draw.choose([1, 2, 8], "ranks")
        info["batch_num_tokens"] = int(mask.sum()) + draw.integer(0, 50, "tokens elsewhere")
        info["global_batch_size"] = len(mask) + draw.integer(0, 9, "rows elsewhere")
    if flag(draw, "a constant length"):
        info["loss_scale_factor"] = draw.choose([1, 10, 4096], "length")
    return info


def rollouts(draw: Draw, min_group: int = 1) -> Rollouts:
    """Groups of any size in any order; rewards non-dyadic, often tied, also small for their offset."""
    g = generator(draw)
    sizes = [draw.integer(min_group, 5, "group size") for _ in range(draw.integer(1, 4, "groups"))]
    ids = torch.repeat_interleave(torch.arange(len(sizes)) * 7 - 3, torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=g)]
    rows, tokens = len(ids), draw.integer(1, 6, "tokens")
    rewards = torch.randint(0, draw.choose([1, 2, 5], "rewards"), (rows,), generator=g).to(FLOAT64) / 10
    rewards += draw.choose([0.0, 0.1, -3.3, 1e4], "offset")
    if flag(draw, "rewards without ties"):
        rewards += torch.randn(rows, generator=g, dtype=FLOAT64)
    mask = draw_mask(draw, g, rows, tokens)
    # At the last attended token, where verl puts it: masked if a tool wrote it or a correction rejected it.
    last = (mask * torch.arange(1, tokens + 1)).argmax(1, keepdim=True)
    last = last + (torch.rand(rows, 1, generator=g) * (tokens - last)).long()
    token_rewards = torch.zeros(rows, tokens, dtype=FLOAT64).scatter(1, last, rewards.unsqueeze(1))
    return Rollouts(rewards, token_rewards, ids, mask)
