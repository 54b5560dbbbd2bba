"""A toy policy with a vocabulary, a sampler of it that may be faulty, and batches of the two."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VOCABULARY, CONTEXTS = 50, 40


def cut(logprobs: Tensor, keep: Tensor) -> Tensor:
    """The distributions cut to these entries."""
    return torch.where(keep, logprobs, -torch.inf).log_softmax(-1)


def top_p(logprobs: Tensor, p: float = 0.9) -> Tensor:
    """The distributions cut to the fewest entries with the mass p."""
    most, places = logprobs.exp().sort(-1, descending=True)
    return cut(logprobs, torch.zeros_like(logprobs).bool().scatter(-1, places, most.cumsum(-1) - most < p))


def top_k(logprobs: Tensor, k: int = 5) -> Tensor:
    """The distributions cut to their k largest entries."""
    return cut(logprobs, logprobs >= logprobs.topk(k, -1).values[..., -1:])


SAMPLERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sound": lambda x: x,
    "bf16": lambda x: (x + 0.008 * torch.randn_like(x)).log_softmax(-1),
    "top_p": top_p,
    "top_k": top_k,
    "min_p": lambda x: cut(x, x >= x.amax(-1, keepdim=True) + torch.tensor(0.1).log()),
    "temperature 0.7": lambda x: (x / 0.7).log_softmax(-1),
    "temperature 1.3": lambda x: (x / 1.3).log_softmax(-1),
}


@dataclass
class World:
    """A policy: one row of logits per context. `batch` has what a loss is called with."""

    sampler: str = "sound"
    seed: int = 0
    logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.logits = (torch.randn(CONTEXTS, VOCABULARY) * 2).requires_grad_()

    def batch(self, rows: int = 16, tokens: int = 24) -> dict[str, Any]:
        """The tensors [rows, tokens] of rollouts of the present policy."""
        contexts = torch.randint(0, CONTEXTS, (rows, tokens))
        own = self.logits.log_softmax(-1)[contexts]
        with torch.no_grad():
            theirs = SAMPLERS[self.sampler](own)
            chosen = torch.multinomial(theirs.exp().flatten(0, 1), 1).view(rows, tokens, 1)
            entropies = -(own.exp() * own).sum(-1)
        logprobs = own.gather(-1, chosen).squeeze(-1)
        return {
            "logprobs": logprobs,
            "old_logprobs": logprobs.detach(),
            "rollout_logprobs": theirs.gather(-1, chosen).squeeze(-1),
            "advantages": torch.randn(rows, 1),
            "mask": torch.ones(rows, tokens, dtype=torch.bool),
            "entropies": entropies,
        }
