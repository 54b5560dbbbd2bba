"""PRIME-RL's own losses as formulas, with its defaults, so that `conform` runs where no checkout of it is.

They equal ours (`live/prime_rl/test_planted_entries.py`), which equal its recorded numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from parity_tests.rigs import prime_rl_doubles as doubles


@dataclass
class Outputs:
    """What a loss returns."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Sequence:
    """The fields of LossInputs, and what the formulas are made of, [tokens] each."""

    def __init__(self, inputs: Any) -> None:
        self.logprobs, self.mask = inputs.trainer_logprobs, inputs.loss_mask
        self.advantages = inputs.advantages
        self.log_ratio = self.logprobs - inputs.inference_logprobs
        self.ratio = self.log_ratio.exp()
        self.shift = self.logprobs.detach().exp() - inputs.inference_logprobs.exp()
        weights = getattr(inputs, "loss_weights", None)
        self.weights = torch.ones_like(self.logprobs) if weights is None else weights


def dppo(
    x: Sequence,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> Tensor:
    """The default: the sign of the advantage says on which side a token is dropped."""
    dropped = torch.where(x.advantages > 0, x.shift > dppo_mask_high, x.shift < -dppo_mask_low)
    return torch.where(dropped, 0.0, -adv_tau * x.advantages * x.ratio) + kl_tau * x.log_ratio**2


def ipo(x: Sequence, ipo_threshold: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3) -> Tensor:
    """IPO."""
    dropped = x.shift.abs() > ipo_threshold
    return torch.where(dropped, 0.0, -adv_tau * x.advantages * x.ratio) + kl_tau * x.log_ratio**2


FORMULAS: dict[str, Callable[..., Tensor]] = {"default": dppo, "ipo": ipo}


class Double:
    """PRIME-RL in the place of a checkout (`prime_rl_claims.upstream.Upstream`)."""

    def loss_fn(self, **table: Any) -> Callable[[Any], Any]:
        """The function for `[trainer.loss]`. TypeError for an option that the loss does not have."""
        kind, *_ = table.pop("type"), table.pop("import_path", None)
        if kind == "custom":
            return partial(loss_fn, **table["kwargs"])
        formula = partial(FORMULAS[kind], **table)

        def own(inputs: Any) -> Outputs:
            x = Sequence(inputs)
            return Outputs(torch.where(x.mask, formula(x) * x.weights, 0.0).sum(), {})

        return own

    def compute_loss(self, pack: Pack, fn: Any, scale: int) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch as the trainer sums and divides it."""
        return doubles.compute_loss(pack, fn, scale)
