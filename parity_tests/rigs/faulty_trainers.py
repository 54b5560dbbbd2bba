"""Subclasses of TRL's trainer as users write them: a sound one, and others with one fault each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

Inputs = dict[str, Any]


def own_loss(reduced: Callable[[Tensor, Tensor, Any], Tensor]) -> type[GRPOTrainer]:
    """A trainer with a loss per token, -A log pi, that `reduced` makes one number."""

    class OwnLoss(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logprobs = self._get_per_token_logps_and_entropies(model, ids, attention, mask.shape[1])[0]
            advantages = inputs["advantages"].reshape(len(mask), -1)
            return reduced(-advantages * logprobs, mask.bool(), self)

    return OwnLoss


class Ascending(GRPOTrainer):
    """A forgotten minus."""

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        return -super()._compute_loss(model, inputs)


def masked(loss: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, loss, 0.0)


def mean_of_rows(loss: Tensor, mask: Tensor) -> Tensor:
    """The mean over completions of the mean over their tokens."""
    return (masked(loss, mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def steps(trainer: Any) -> Any:
    """The number of micro-batches of an optimizer step."""
    return trainer.current_gradient_accumulation_steps


Sound = own_loss(lambda loss, mask, t: mean_of_rows(loss, mask) / steps(t))
MeanOfTheMicroBatch = own_loss(lambda loss, mask, t: masked(loss, mask).sum() / mask.sum() / steps(t))
NotDivided = own_loss(lambda loss, mask, _: mean_of_rows(loss, mask))
OverPadding = own_loss(lambda loss, mask, t: masked(loss, mask).mean() / steps(t))
Unmasked = own_loss(lambda loss, mask, t: loss.mean() / steps(t))
