"""The reductions of verl, NeMo-RL and Stable-RL, by our `aggregate`.

An upstream's own rounding or padding of a denominator is reproduced here, so that a comparison can be as
strict as float64. Each one is a row of `divergences.md`.
"""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import Mode, aggregate

VERL_LENGTH_EPS = 1e-8
NEMO_RL_EPS = 1e-8


def verl(token_loss: Tensor, mask: Tensor, mode: str, **info: Any) -> Tensor:
    """Reduce as verl 0.9.1's agg_loss: the length of a row is n + 1e-8, the number of ranks a factor."""
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(-1, keepdim=True).to(torch.float64)
        token_loss = token_loss * (lengths / (lengths + VERL_LENGTH_EPS))
    return reductions.verl(token_loss, mask, mode, info)


def nemo_rl(token_loss: Tensor, mask: Tensor, *, num_sequences: float | None = None) -> Tensor:
    """Reduce as NeMo-RL's masked_mean, which adds 1e-8 to every denominator: over tokens, or over rows.

    `num_sequences` counts the rows that its sample_mask keeps, with or without an unmasked token.
    """
    if num_sequences is None:
        return aggregate(token_loss, mask, "token-mean", num_tokens=float(mask.sum()) + NEMO_RL_EPS)
    lengths = mask.sum(-1, keepdim=True).to(torch.float64)
    token_loss = token_loss * (lengths / (lengths + NEMO_RL_EPS))
    return aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=num_sequences + NEMO_RL_EPS)


def stable_rl(token_loss: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    """Reduce as Stable-RL's agg_loss (of an older verl): "-norm" does not divide by the sequences."""
    if mode == "seq-mean-token-sum-norm":
        return aggregate(token_loss, mask, mode, num_sequences=1, max_length=mask.shape[-1])
    return verl(token_loss, mask, mode)
