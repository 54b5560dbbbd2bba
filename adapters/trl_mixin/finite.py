"""The error for a loss or a metric of a channel that is not finite: TRL drops NaN from the means it logs."""

from collections.abc import Mapping

from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.errors import DataError
from composer_plugins.losses import finite
from composer_plugins.losses.finite import WEIGHTS, not_finite

POLICY = "lower learning_rate or set max_grad_norm, and look at grad_norm in the steps before this one"
OF_VLLM = "look at the log-probabilities that vLLM returned"

# By the input of a loss that is not finite, what to look at.
REMEDIES = {
    **finite.REMEDIES,
    **dict.fromkeys(("ref_chosen", "ref_rejected"), WEIGHTS.format("reference, its initial policy,")),
    **dict.fromkeys(("rollout_logprobs", "log_weights"), OF_VLLM),
}


def not_finite_error(
    trainer: GRPOTrainer, term: str, problem: str, inputs: Mapping[str, Tensor]
) -> DataError:
    """The error for a term of the loss that is not finite, with the input that it comes from.

    `inputs` are those of the term; `inputs["mask"]` says which of their elements count.
    """
    step = trainer.state.global_step + bool(trainer.model.training)
    name, found = next(not_finite(inputs), ("", ""))
    if found:
        problem += f", because {found}"
    elif trainer.accelerator.num_processes > 1:
        problem += ", and all its inputs are finite, unless they are of another process, which then names "
        problem += "them"
    else:
        problem += ", and all its inputs are finite, so it overflows"
    return DataError(f"{term}, step {step}", problem, REMEDIES.get(name, POLICY))
