"""How PRIME-RL calls a custom loss: `composer-plugins check module:function --as prime-rl`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from composer_plugins.adapters.prime_rl_plugin.upstream import REFERENCE, STREAMS, WEIGHTS, require
from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair
from composer_plugins.frameworks.prime_rl import NEWEST_TESTED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class LossInputs:
    """What PRIME-RL gives a custom loss: one sequence, [tokens] each."""

    trainer_logprobs: Any
    inference_logprobs: Any
    advantages: Any
    loss_mask: Any
    ref_logprobs: Any = None
    loss_weights: Any = None


def is_metric(value: Any) -> bool:
    """Whether PRIME-RL can stack it and take the mean."""
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def call(
    function: Function,
    tensors: "Mapping[str, Tensor]",
    counts: Counts,
    options: Mapping[str, Any],
    *,
    inputs: type[Any],
) -> Called:
    """Call it once per sequence, add up, and divide by the unmasked tokens of the global batch."""
    streams = dict(zip(STREAMS, (tensors[name] for name in NEEDS), strict=True))
    reference, log_weights = tensors.get("ref_logprobs"), tensors.get("log_weights")
    streams |= {} if reference is None else {REFERENCE: reference}
    streams |= {} if log_weights is None else {WEIGHTS: log_weights.exp()}
    names = [one.name for one in fields(inputs)]
    total, problems = tensors["logprobs"].new_zeros(()), dict[str, None]()
    for row in range(len(tensors["mask"])):
        result = function(inputs(**{n: streams[n][row] if n in streams else None for n in names}))
        if not (hasattr(result, "loss") and hasattr(result, "metrics")):
            raise TypeError(f"it returned {type(result).__name__}, and not LossOutputs(loss, metrics)")
        loss, found = checked_pair((result.loss, result.metrics), is_metric, "a tensor of floating point")
        total, problems = total + loss, problems | dict.fromkeys(found)
    return Called(total / counts.tokens, tuple(problems))


def of_version(function: Function, version: str | None) -> Convention:
    """Return how this version of PRIME-RL calls a function; ConfigError for one that is too old.

    A function whose annotation names a LossInputs of its own gets that class.
    """
    require(version)
    own = own_class(function)
    inputs = own or LossInputs
    optional = ("ref_logprobs", *(["log_weights"] if WEIGHTS in inputs.__dataclass_fields__ else []))
    return replace(
        PRIME_RL,
        call=partial(call, inputs=inputs),
        release=version or (NEWEST_TESTED if own is None else ""),
        optional=optional,
        must_use=optional[1:],
    )


def own_class(function: Function) -> Any:
    """Return the dataclass that a function takes by its annotation, if it has the fields of LossInputs."""
    try:
        first = next(iter(get_type_hints(inspect.unwrap(function)).values()), None)
    except Exception:  # an annotation that cannot be resolved
        return None
    if not isinstance(first, type) or not is_dataclass(first):
        return None
    return first if {*STREAMS} <= {one.name for one in fields(first)} else None


NEEDS = ("logprobs", "rollout_logprobs", "advantages", "mask")
PRIME_RL = Convention(
    framework="prime-rl",
    signature="fn(inputs: LossInputs, **kwargs)",
    returns="LossOutputs(loss, metrics): the sum over the unmasked tokens of one sequence, with a gradient, "
    "and a dict of tensors. PRIME-RL adds up the sequences and divides by the tokens of the global batch",
    call=partial(call, inputs=LossInputs),
    needs=NEEDS,
    optional=("ref_logprobs", "log_weights"),
    must_use=("log_weights",),
    of_version=of_version,
    names=dict(zip(NEEDS, STREAMS, strict=True)) | {"log_weights": WEIGHTS},
)
