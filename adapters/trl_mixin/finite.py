"""The error for a loss or a metric of a channel that is not finite: TRL drops NaN from the means it logs."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.errors import DataError

POLICY = "lower learning_rate or set max_grad_norm, and look at grad_norm in the steps before this one"
WEIGHTS = "look for weights that are not finite in the {} of this run"

# By the input of a loss that is not finite, what to look at.
REMEDIES = {
    **dict.fromkeys(("logprobs", "student_logprobs", "old_logprobs"), POLICY),
    **dict.fromkeys(("chosen", "rejected", "chosen_nll"), POLICY),
    "teacher_logprobs": WEIGHTS.format("teacher"),
    **dict.fromkeys(("ref_chosen", "ref_rejected"), WEIGHTS.format("reference, its initial policy,")),
    "advantages": "look at the rewards of this batch",
    **dict.fromkeys(("rollout_logprobs", "log_weights"), "look at the log-probabilities that vLLM returned"),
}


def raise_not_finite(
    trainer: GRPOTrainer, channel: str, what: str, value: float, inputs: Mapping[str, Tensor]
) -> NoReturn:
    """Raise DataError for `what`, a loss or a metric of a channel, with the input that it comes from.

    `inputs` are those of the loss; `inputs["mask"]` says which of their elements count.
    """
    step = trainer.state.global_step + bool(trainer.model.training)
    problem = f"its {what} is {value}"
    found = next(_not_finite(inputs), None)
    if found is not None:
        problem, remedy = f"{problem}, because {found[1]}", REMEDIES[found[0]]
    elif trainer.accelerator.num_processes > 1:
        problem += (
            ", and all its inputs are finite, unless they are of another process, which then names them"
        )
        remedy = POLICY
    else:
        problem, remedy = f"{problem}, and all its inputs are finite, so it overflows", POLICY
    raise DataError(f"the {channel} channel, step {step}", problem, remedy)


def _not_finite(inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the name of each input with an unmasked value that is not finite, and where its first one is."""
    for name, tensor in inputs.items():
        values, mask = torch.broadcast_tensors(tensor.detach(), inputs["mask"])
        wrong = mask & ~values.isfinite()
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "token"), first, strict=False))
            count = f"{int(wrong.sum())} of {int(mask.sum())}"
            yield (
                name,
                f"{count} values of {name} are not finite, the first ({float(values[*first])}) at {place}",
            )
