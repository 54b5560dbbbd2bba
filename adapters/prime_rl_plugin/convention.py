"""How PRIME-RL calls a custom loss: `composer-plugins check module:function --as prime-rl`."""

import inspect
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from composer_plugins.adapters.prime_rl_plugin.upstream import REFERENCES, STREAMS, WEIGHTS, generation_of
from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair, words_of
from composer_plugins.frameworks.prime_rl import GENERATIONS, LOSS_INPUTS, NEWEST_TESTED, _0_6

if TYPE_CHECKING:
    from torch import Tensor


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
    streams |= {} if reference is None else dict.fromkeys(REFERENCES, reference)
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
    """Return how this version of PRIME-RL calls a function, with the LossInputs of that version.

    A function whose annotation names a class of its own gets that class. Without a version, a function that
    reads `teacher_logprobs` is one of a release that has this field.
    """
    own, words = own_class(function), words_of(function)
    is_older = own is None and REFERENCES[1] in words and REFERENCES[0] not in words
    release = f"{_0_6.since}.0" if version is None and is_older else version
    inputs = own or loss_inputs(release)
    optional = ("ref_logprobs", *(["log_weights"] if WEIGHTS in inputs.__dataclass_fields__ else []))
    return replace(
        PRIME_RL,
        call=partial(call, inputs=inputs),
        release=release or (NEWEST_TESTED if own is None else ""),
        optional=optional,
        must_use=optional[1:],
    )


def loss_inputs(release: str | None) -> Any:
    """Return a dataclass with the fields that LossInputs has in this release; None is the newest tested."""
    reached = GENERATIONS[: GENERATIONS.index(generation_of(release)) + 1]
    added = next(names for since, names in reversed(LOSS_INPUTS) if since in reached)
    more = [(one, Any, field(default=None)) for one in added]
    return make_dataclass("LossInputs", [*((one, Any) for one in STREAMS), *more])


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
    call=partial(call, inputs=loss_inputs(None)),
    needs=NEEDS,
    optional=("ref_logprobs", "log_weights"),
    must_use=("log_weights",),
    of_version=of_version,
    names=dict(zip(NEEDS, STREAMS, strict=True)) | {"log_weights": WEIGHTS},
)
