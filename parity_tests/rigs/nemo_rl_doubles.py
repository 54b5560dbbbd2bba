"""What NeMo-RL's trainers pass to a loss, and the module with its types, as doubles of both."""

import enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "nemo_rl.algorithms.loss.interfaces"


def interfaces() -> ModuleType:
    """A module with the types of NeMo-RL's interfaces.py."""
    found: Any = ModuleType(MODULE)
    found.LossType = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
    found.LossInputType = enum.Enum("LossInputType", "LOGIT LOGPROB DISTILLATION DRAFT")
    found.MetricNormalizer = enum.Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")
    module: ModuleType = found
    return module


def wider(x: Tensor) -> Tensor:
    """Tensors of tokens with a first column, as NeMo-RL has them beside the log-probabilities."""
    return torch.nn.functional.pad(x, (1, 0))


def data(seed: int = 0, rows: int = 4, width: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of next tokens, and the data of a batch in which the last row is left out."""
    g = torch.Generator().manual_seed(seed)

    def near(x: Tensor, spread: float) -> Tensor:
        return (x + spread * torch.randn(x.shape, generator=g, dtype=torch.float64)).clamp(max=-1e-4)

    logprobs = -0.05 - 4 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[:, 0] = True
    samples = torch.ones(rows, dtype=torch.float64)
    samples[-1] = 0.0
    old = near(logprobs, 0.3)
    return logprobs.requires_grad_(), {
        "token_mask": wider(mask.double()),
        "sample_mask": samples,
        "advantages": wider(torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width)),
        "prev_logprobs": wider(old),
        "generation_logprobs": wider(near(old, 0.1)),
        "reference_policy_logprobs": wider(near(logprobs.detach(), 0.5)),
    }


def counts(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The valid sequences and tokens of a batch, which NeMo-RL adds up over all ranks."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(-1)
    return batch["sample_mask"].sum(), mask.sum()
