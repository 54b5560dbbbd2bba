"""The batch that goes through the real loss paths of the frameworks."""

from typing import NamedTuple

import torch
from torch import Tensor

LENGTHS = (7, 3, 5, 1, 6, 4)  # tokens of each completion
WIDTH = max(LENGTHS)


class Batch(NamedTuple):
    """A padded batch of completions, [rows, width] each; one advantage per row."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor


def drawn(seed: int, *, same_behaviour: bool) -> Batch:
    """A batch whose ratios reach the clips; `same_behaviour`: the rollout engine agrees with the trainer."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), WIDTH)

    def normal() -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    logprobs = -0.05 - 3 * torch.rand(shape, generator=g, dtype=torch.float64)
    old = (logprobs + 0.3 * normal()).clamp(max=-1e-3)
    rollout = old if same_behaviour else (old + 0.1 * normal()).clamp(max=-1e-3)
    reference = logprobs + 0.2 * normal()
    advantages = torch.randn(shape[0], 1, generator=g, dtype=torch.float64).expand(shape)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    return Batch(logprobs, old, rollout, reference, advantages, mask)
