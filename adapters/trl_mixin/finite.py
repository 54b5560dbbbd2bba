"""The errors for a loss and a gradient that are not finite: TRL drops NaN from the means it logs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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
    "KL": "look for weights of the reference that are wrong, lower learning_rate, or set beta to 0: TRL's KL "
    "is exp(log pi_ref - log pi), which overflows where the reference is 88 nats above the policy",
    "entropies": "look for logits of the policy that are -inf, or set entropy_coef to 0",
}
OF_THE_GRADIENT = (
    "look for an operation whose derivative is not finite, such as a root or a logarithm at 0, with "
    "torch.autograd.set_detect_anomaly(True), or lower learning_rate"
)


def not_finite_error(
    trainer: GRPOTrainer, term: str, problem: str, inputs: Mapping[str, Tensor]
) -> DataError:
    """The error for a term of the loss that is not finite, with the input that it comes from.

    `inputs` are the inputs of the term; `inputs["mask"]` says which of their elements count.
    """
    step, training = trainer.state.global_step, trainer.model.training
    key = f"{term}, step {step + 1}" if training else f"{term}, evaluation after step {step}"
    name, found = next(not_finite(inputs), ("", ""))
    why, remedy = ", and all its inputs are finite, so it overflows", POLICY
    if found:
        why, remedy = f", because {found}", REMEDIES.get(name, POLICY)
    elif trainer.accelerator.num_processes > 1:
        why = ", and all its inputs on this process are finite"
        remedy = f"read the error of the other processes; if they say the same, {POLICY}"
    return DataError(key, f"{problem}{why}", remedy)


def finite_norm(trainer: GRPOTrainer, norm: Tensor | float) -> Tensor | float:
    """Return the norm of the gradient as a number, for TRL's log; DataError if the gradient is not finite.

    Neither is known where float16 scales the loss, because its scaler skips the step of an infinite gradient,
    nor with DeepSpeed, which has taken the step already. The norm alone may overflow, as a sum of squares:
    then clipping has made the gradient 0.
    """
    if trainer.is_deepspeed_enabled or trainer.accelerator.scaler is not None:
        return norm
    value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(value) and not _gradient_is_finite(trainer):
        key = f"the gradient, step {trainer.state.global_step + 1}"
        raise DataError(key, f"its norm is {value}, and the loss is finite", OF_THE_GRADIENT)
    return value


def _gradient_is_finite(trainer: GRPOTrainer) -> bool:
    """Whether every number of the gradient is finite, on every process. It waits for the device."""
    gradients = [one.grad for one in trainer.model.parameters() if one.grad is not None]
    shards = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    number = sum((~one.isfinite()).sum().to(trainer.accelerator.device) for one in shards)
    total = trainer.accelerator.reduce(torch.as_tensor(number, dtype=torch.float32), reduction="sum")
    return not bool(total)
