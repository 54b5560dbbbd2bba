"""The convention of torchtitan, which gives a loss of RL the logits and the tokens of the whole step.

Read in torchtitan 0.3.0, `experiments/rl/actors/trainer.py`. It is not imported.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair

# Of the names of metrics: they say how torchtitan adds up the chunks of a micro-batch.
ENDINGS = ("/mean", "/frac", "_mean", "_frac", "/max", "/min")


def is_metric(value: Any) -> bool:
    """Whether a framework can detach it and add it up over ranks: one number in a tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.requires_grad


def logits_of(logprobs: Tensor) -> Tensor:
    """Logits [..., 3] whose entry 0 has these log-probabilities, and their gradient.

    Entry 1 has the rest of the probability. So log pi of entry 0 is its logit l less logsumexp = 0, and
    d logsumexp / d l = p - (1 - p) p / (1 - p) = 0: the gradient in log pi is that in the logit.
    """
    most = -torch.finfo(logprobs.dtype).eps
    rest = torch.log(-torch.expm1(logprobs.clamp(max=most)))
    return torch.stack([logprobs, rest, torch.full_like(rest, -torch.inf)], -1)


def call_torchtitan(
    function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call it as `PolicyTrainer.forward_backward` does, in float32, with logits of the log-probabilities.

    Masked tokens have ordinary logits, because a model that gives NaN there spoils its own weights too.
    """
    mask = tensors["mask"]
    logprobs = torch.where(mask, tensors["logprobs"], -1.0)
    result = function(
        logits_of(logprobs.float()),
        torch.zeros_like(mask, dtype=torch.long),
        counts.tokens,
        generator_logprobs=tensors["rollout_logprobs"].float(),
        advantages=tensors["advantages"].float(),
        loss_mask=mask,
    )
    loss, problems = checked_pair(result, is_metric, "one number in a tensor without a gradient")
    unnamed = [name for name in result[1] if not str(name).endswith(ENDINGS)] if not problems else []
    endings = ", ".join(ENDINGS)
    problems += tuple(f"the metric {name!r} has none of the endings {endings}" for name in unnamed)
    return Called(loss.to(logprobs.dtype), problems)


TORCHTITAN = Convention(
    framework="torchtitan",
    signature="fn(logits, labels, global_valid_tokens, *, generator_logprobs, advantages, loss_mask)",
    returns="(loss, metrics): the sum over the unmasked tokens divided by global_valid_tokens, with a "
    "gradient, and a dict of tensors with one number each, whose names end in /mean or another of "
    "torchtitan's endings",
    call=call_torchtitan,
    precision=torch.float32,
    needs=("logprobs", "rollout_logprobs", "advantages", "mask"),
    names={"logprobs": "logits", "rollout_logprobs": "generator_logprobs", "mask": "loss_mask"},
)
