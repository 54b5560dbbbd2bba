"""The k most probable tokens of each distribution from hidden states: what a remote teacher hands over."""

import torch
from torch import Tensor

from composer_plugins.kernels.linear.tiles import (
    Bias,
    Head,
    Hidden,
    Weight,
    autocast,
    check_head,
    cuts,
    head_of,
    numbers_of,
    tile_size,
    without_autocast,
)
from composer_plugins.kernels.masking import wide
from composer_plugins.kernels.types import LogProbs, VocabIds


@torch.no_grad()
def top_k(
    hidden: Hidden,
    weight: Weight,
    k: int,
    *,
    bias: Bias | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[LogProbs, VocabIds]:
    """The k largest log-probabilities of each token, in nats and falling, and their vocabulary entries.

    The log-probabilities are float32 at least and those of the whole distribution: their normaliser is the
    sum over all entries. Without gradient.
    Raises ValueError unless k is between 1 and the size of the vocabulary, and for shapes and dtypes that do
    not belong together.
    """
    if not 1 <= k <= weight.shape[0]:
        raise ValueError(f"k is {k}; it lies in [1, {weight.shape[0]}], the size of the vocabulary")
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_head(hidden, weight, bias)
    return _top_k(hidden, head_of(weight, bias, numbers_of(logit_scale, softcap, temperature)), k)


@without_autocast
def _top_k(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    states = hidden.reshape(-1, hidden.shape[-1])
    best = states.new_empty(len(states), 0, dtype=wide(hidden.dtype))
    ids, total = best.long(), best.new_full((len(states),), -torch.inf)
    for entries in cuts(len(head.weight), tile_size(hidden), len(states)):
        logits = head.cut(entries).logits(states)
        total = torch.logaddexp(total, logits.logsumexp(1))
        found = logits.topk(min(k, logits.shape[1]), 1)
        values = torch.cat([best, found.values], 1)
        best, order = values.topk(min(k, values.shape[1]), 1)
        ids = torch.cat([ids, found.indices + entries.start], 1).gather(1, order)
    shape: tuple[int, ...] = (*hidden.shape[:-1], k)
    return (best - total.unsqueeze(1)).view(shape), ids.view(shape)
