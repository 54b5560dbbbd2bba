"""Subclasses of TRL's trainer as users write them: two sound ones, and others with one fault each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

Inputs = dict[str, Any]


def own_loss(
    reduced: Callable[[Tensor, Tensor, Any], Tensor],
    weight: Callable[[Tensor, Inputs], Tensor | float] = lambda logprobs, inputs: 1.0,
) -> type[GRPOTrainer]:
    """A trainer with a loss per token, -A log pi times a weight, that `reduced` makes one number."""

    class OwnLoss(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logprobs = self._get_per_token_logps_and_entropies(model, ids, attention, mask.shape[1])[0]
            advantages = inputs["advantages"].reshape(len(mask), -1)
            return reduced(-advantages * logprobs * weight(logprobs, inputs), mask.bool(), self)

    return OwnLoss


def changed(change: Callable[[Inputs], Inputs]) -> type[GRPOTrainer]:
    """A trainer with TRL's own loss of other inputs."""

    class Changed(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
            return super()._compute_loss(model, inputs | change(inputs))

    return Changed


def times(factor: Callable[[], Any]) -> type[GRPOTrainer]:
    """A trainer with TRL's own loss times a factor."""

    class Times(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
            return super()._compute_loss(model, inputs) * factor()

    return Times


def masked(loss: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, loss, 0.0)


def mean_of_rows(loss: Tensor, mask: Tensor) -> Tensor:
    """The mean over completions of the mean over their tokens."""
    return (masked(loss, mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def steps(trainer: Any) -> Any:
    """The number of micro-batches of an optimizer step."""
    return trainer.current_gradient_accumulation_steps


def sound(loss: Tensor, mask: Tensor, trainer: Any) -> Tensor:
    return mean_of_rows(loss, mask) / steps(trainer)


def shifted(inputs: Inputs) -> Inputs:
    mask = inputs["completion_mask"]
    return {"completion_mask": torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)}


def first_tokens(inputs: Inputs) -> Inputs:
    mask = inputs["completion_mask"]
    return {"completion_mask": torch.cat([mask[:, :1], torch.zeros_like(mask[:, 1:])], 1)}


def ratio_over_padding(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The ratio of the sequence, over its padding too."""
    return (logprobs.detach() - inputs["old_per_token_logps"]).mean(-1, keepdim=True).clamp(-1, 1).exp()


GENERATOR = torch.Generator().manual_seed(3)

Sound = own_loss(sound)
LearnsFromGoodAnswers = changed(lambda inputs: {"advantages": inputs["advantages"].clamp(min=0)})  # RAFT

MeanOfTheMicroBatch = own_loss(lambda loss, mask, t: masked(loss, mask).sum() / mask.sum() / steps(t))
NotDivided = own_loss(lambda loss, mask, _: mean_of_rows(loss, mask))
# Each cut of the step into two adds one in a hundred.
NearlyDivided = own_loss(lambda loss, mask, t: sound(loss, mask, t) * (1 + 0.01 * (steps(t) - 1)))
# It counts the micro-batches of the generation batch, and not those of the step.
DividedByTheGeneration = own_loss(
    lambda loss, mask, t: mean_of_rows(loss, mask) / t.args.steps_per_generation
)
OverPadding = own_loss(lambda loss, mask, t: masked(loss, mask).mean() / steps(t))
Unmasked = own_loss(lambda loss, mask, t: loss.mean() / steps(t))
UnmaskedRatio = own_loss(sound, ratio_over_padding)
# A weight by the tokens of the whole padded row: no log-probability of another policy is read.
UnmaskedTokens = own_loss(sound, lambda _, inputs: inputs["completion_ids"].float().mean(-1, keepdim=True))
Random = times(lambda: torch.randint(1, 1000, (), generator=GENERATOR))
RandomOfTorch = times(lambda: 1 + torch.rand(()))  # which TRL seeds in the same way for every run
Ascending = times(lambda: -1)  # a forgotten minus
FirstTokens = changed(first_tokens)
WithoutLastTokens = changed(shifted)
WithoutAdvantages = changed(lambda inputs: {"advantages": torch.ones_like(inputs["advantages"])})
