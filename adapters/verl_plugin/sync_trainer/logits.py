"""What the hint reads of the logits [1, tokens, vocabulary] that verl's engine shows, without a copy."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.upstream import whole_logits
from composer_plugins.kernels.masking import at_least_float32

TILE = 2**24  # elements of some whole rows: 64 MiB in float32


def top_k(logits: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities at each position, all other entries' together, and the k ids.

    They are [positions, k + 1], in float32, and [positions, k]. Without gradient.
    """
    tiles = positions.to(logits.device).split(max(1, TILE // logits.shape[-1]))
    found = [_top_k(logits[0, tile], k) for tile in tiles]
    return torch.cat([values for values, _ in found]), torch.cat([ids for _, ids in found])


def _top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(k, -1)
    rest = logprobs.scatter_(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([values, rest], -1), ids


def log_odds(logits: Tensor, positions: Tensor, sampled: Tensor, ids: Tensor) -> Tensor:
    """Return log S_v - log S_y = z_v - z_y of the entries v in `ids` [n, k] and of the sampled token y [n].

    Autograd would give this a gradient of zeros as large as the logits. Instead a hook adds the gradient of
    these entries to the gradient of verl's log-probabilities, in place, so they must be a part of the loss
    too. The backward does not read the logits, because flash-attn's cross-entropy has overwritten them.
    """
    whole, shape, found = whole_logits(logits), logits.shape[1:], list[Tensor]()
    index = positions.unsqueeze(-1), torch.cat([sampled.unsqueeze(-1), ids], -1)
    if whole is None:
        return _odds(logits[0][index])

    def add(gradient: Tensor) -> Tensor:  # without a reference to the logits, which it would keep alive
        gradient = gradient.contiguous()
        for slopes in found:
            # The sum at y is over the others: 1 - p_y may be smaller than the rounding of p_y.
            slopes = slopes.masked_fill(ids == index[1][:, :1], 0.0)
            slopes = torch.cat([-slopes.sum(-1, keepdim=True), slopes], -1)
            gradient.view(shape).index_put_(index, slopes.to(gradient.dtype), accumulate=True)
        found.clear()
        return gradient

    if whole.requires_grad:
        whole.register_hook(add)
    odds: Tensor = _LogOdds.apply(whole, shape, index, found)  # type: ignore[no-untyped-call]
    return odds


def _odds(entries: Tensor) -> Tensor:
    entries = at_least_float32(entries)
    return entries[:, 1:] - entries[:, :1]


class _LogOdds(torch.autograd.Function):
    """z_v - z_y. Its incoming gradient goes to `found`, before the gradient of `whole` is complete."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, shape: torch.Size, index: tuple[Tensor, Tensor], found: list[Tensor]
    ) -> Tensor:
        ctx.found = found
        return _odds(whole.view(shape)[index])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, ...]:
        ctx.found.extend(slopes)
        return (None,) * 4
