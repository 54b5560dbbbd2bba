"""A TRL loss as one number: `composer-plugins check dapo --as trl`, or of a subclass of GRPOTrainer.

TRL has no functions of losses: `_compute_loss` of its trainer has them all, and a `loss_type` chooses one.
So what is called is `_compute_loss`, unchanged, of a tiny trainer. Its forward pass gives the drawn
log-probabilities. A user's loss is a subclass that overrides `_compute_loss`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from composer_plugins.adapters.trl_mixin.probe import tiny_trainer
from composer_plugins.adapters.trl_mixin.upstream import loss_of_logprobs
from composer_plugins.calling_convention import Called, Convention, Counts, Function, scalar_problems
from composer_plugins.errors import ConfigError, in_a_line, unknown
from composer_plugins.frameworks.trl import LOSS_TYPES

WIDTH = 11  # max_completion_length of the tiny trainer


class Processes:
    """An accelerator that says another number of processes."""

    def __init__(self, accelerator: Any, processes: int) -> None:
        self.accelerator, self.num_processes = accelerator, processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)


def of_loss_type(name: str) -> Function:
    """What makes a trainer with this loss_type; ConfigError if TRL does not have it."""
    if name not in LOSS_TYPES:
        raise unknown("check", name, LOSS_TYPES, noun="loss_type")
    level = {"luspo": "sequence"}.get(name, "token")  # luspo is refused with tokens
    return partial(tiny_trainer, loss_type=name, importance_sampling_level=level, max_completion_length=WIDTH)


def inputs_of(trainer: Any, tensors: Mapping[str, Tensor], counts: Counts) -> dict[str, Any]:
    """One micro-batch as `_compute_loss` gets it, in a step of that many micro-batches and processes."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = counts.parts
    trainer.args.steps_per_generation = counts.parts
    trainer.accelerator = Processes(trainer.accelerator, counts.ranks)
    ids = torch.ones_like(tensors["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tensors["mask"].long(),
        "advantages": tensors["advantages"],
        "num_items_in_batch": torch.tensor(counts.tokens),
    }
    if "old_logprobs" in tensors:
        inputs["old_per_token_logps"] = tensors["old_logprobs"]
    return inputs


def specialised(function: Function) -> Convention:
    """The convention for one trainer, which is made once."""
    try:
        trainer = (
            tiny_trainer(function, max_completion_length=WIDTH) if isinstance(function, type) else function()
        )
        accelerator = trainer.accelerator
    except Exception as error:
        problem = f"no trainer can be made of it: {in_a_line(error)}"
        raise ConfigError("check", problem, f"name {TRL.signature}, which takes no argument") from error

    def call(
        function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
    ) -> Called:
        """Call `_compute_loss` on one micro-batch; the mean over the processes is DDP's."""
        cast(Any, trainer).accelerator = accelerator
        loss = loss_of_logprobs(trainer, inputs_of(trainer, tensors, counts), tensors["logprobs"])
        return Called(loss / counts.ranks, scalar_problems(loss))

    return replace(TRL, call=call)


TRL = Convention(
    framework="trl",
    signature="a loss_type, a subclass of trl.GRPOTrainer, or a function that returns a GRPOTrainer",
    returns="one number with a gradient, divided by current_gradient_accumulation_steps or by "
    "num_items_in_batch, which count the micro-batches and the tokens of the whole step",
    equal_parts=True,
    names={"logprobs": "per_token_logps", "old_logprobs": "old_per_token_logps", "mask": "completion_mask"},
    find=of_loss_type,
    specialise=specialised,
)
