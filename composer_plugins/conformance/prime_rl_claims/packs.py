"""Random micro-batches as PRIME-RL's trainer has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Pack:
    """A micro-batch: sequences one after the other, the padding in the last one's tail."""

    trainer_logprobs: list[Tensor]
    inference_logprobs: list[Tensor]
    reference: list[Tensor] | None
    advantages: list[Tensor]
    loss_mask: list[Tensor]
    weights: list[Tensor] | None = None


def drawn_inputs(seed: int, length: int, *, spread: float) -> dict[str, Tensor]:
    """One sequence in float64: log-probabilities of two policies that far apart, advantages, a mask."""
    g = torch.Generator().manual_seed(seed)
    policy = -0.02 - 4 * torch.rand(length, generator=g, dtype=torch.float64)
    rollout = (policy + spread * torch.randn(length, generator=g, dtype=torch.float64)).clamp(max=-1e-4)
    advantages = torch.randint(-2, 3, (1,), generator=g) * 0.7 + 0.1 * torch.randn(length, generator=g)
    return {
        "trainer_logprobs": policy,
        "inference_logprobs": rollout,
        "advantages": advantages.double(),
        "loss_mask": torch.rand(length, generator=g) < 0.7,
    }


def packed(samples: Sequence[dict[str, Tensor]], padding: int = 0) -> Pack:
    """Samples as one micro-batch: absent streams filled as upstream does, padding at the end of the last."""

    def stream(name: str, fill: float) -> list[Tensor] | None:
        if all(name not in sample for sample in samples):
            return None
        return [
            sample.get(name, torch.full_like(sample["trainer_logprobs"], fill).detach()) for sample in samples
        ]

    streams = {
        "trainer_logprobs": [s["trainer_logprobs"] for s in samples],
        "inference_logprobs": [s["inference_logprobs"] for s in samples],
        "reference": stream("reference", 0.0),
        "advantages": [s["advantages"] for s in samples],
        "loss_mask": [s["loss_mask"] for s in samples],
        "weights": stream("weights", 1.0),
    }
    if padding:
        for values in streams.values():
            if values is not None:
                values[-1] = torch.cat([values[-1], values[-1].new_zeros(padding)])
    return Pack(**streams)  # type: ignore[arg-type]
