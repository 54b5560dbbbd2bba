"""How PRIME-RL calls a custom loss: `composer-plugins check module:function --as prime-rl`."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composer_plugins.adapters.prime_rl_plugin.upstream import REFERENCES, STREAMS, WEIGHTS
from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair

if TYPE_CHECKING:
    from torch import Tensor


def is_metric(value: Any) -> bool:
    """Whether PRIME-RL can stack it and take the mean."""
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def call(
    function: Function, tensors: "Mapping[str, Tensor]", counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call it once per sequence, add up, and divide by the unmasked tokens of the global batch."""
    given = [tensors[name] for name in NEEDS]
    reference, log_weights = tensors.get("ref_logprobs"), tensors.get("log_weights")
    total, problems = given[0].new_zeros(()), dict[str, None]()
    for row in range(len(given[0])):
        result = function(
            SimpleNamespace(
                **{name: x[row] for name, x in zip(STREAMS, given, strict=True)},
                **{REFERENCES[0]: None if reference is None else reference[row]},
                **{WEIGHTS: None if log_weights is None else log_weights[row].exp()},
            )
        )
        if not (hasattr(result, "loss") and hasattr(result, "metrics")):
            raise TypeError(f"it returned {type(result).__name__}, and not LossOutputs(loss, metrics)")
        loss, found = checked_pair((result.loss, result.metrics), is_metric, "a tensor of floating point")
        total, problems = total + loss, problems | dict.fromkeys(found)
    return Called(total / counts.tokens, tuple(problems))


NEEDS = ("logprobs", "rollout_logprobs", "advantages", "mask")
PRIME_RL = Convention(
    framework="prime-rl",
    signature="fn(inputs: LossInputs, **kwargs)",
    returns="LossOutputs(loss, metrics): the sum over the unmasked tokens of one sequence, with a gradient, "
    "and a dict of tensors. PRIME-RL adds up the sequences and divides by the tokens of the global batch",
    call=call,
    needs=NEEDS,
    optional=("ref_logprobs", "log_weights"),
    must_use=("log_weights",),
    names=dict(zip(NEEDS, STREAMS, strict=True)) | {"log_weights": WEIGHTS},
)
