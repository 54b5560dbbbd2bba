"""What kernels do not check, because it would cost a device sync: the tensors they are fed with.

An adapter calls `check_inputs` once, on its first batch. Nothing is coerced: a mask of floats or
log-probabilities of integers is a mistake upstream of us, and the error says so.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from composer_plugins.catalogue import Choice, Loss
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.inputs import INPUTS, ROWS, TOKENS

BOOLEANS = {"mask", "desirable", "component_mask"}
INTEGERS = {"group_ids", "teacher_topk_ids"}
EITHER = {"lengths"}  # a count, or a sum of weights
OTHERS: dict[str, type] = {"a torch.Generator": torch.Generator, "an int": int}

# How far above 0 a log-probability may stand by rounding. It is a difference of logits of some tens, so
# a few units in the last place of those, which is tens of eps. In half precision that would be 0.5; but
# a log-softmax is summed in float32 there too, and only the result is rounded. 0.05 is a probability of
# 1.05: a ratio off by so much, a quarter of the way to PPO's clip, is no rounding to be waved through.
ROUNDINGS, MOST = 64, 0.05


def check_inputs(choice: Choice, inputs: Mapping[str, Any], *, values: bool = True) -> None:
    """Raise DataError unless these tensors, by their names in the catalogue, are what the loss takes.

    Checked are presence, dtype, shape, a top-k no larger than the vocabulary (`top_k`: ConfigError); and
    of values, at live tokens, that log-probabilities are not positive and ids within the vocabulary:
    this waits for the device, and `values=False` leaves it out. NaN passes: the loss must show it.
    """
    loss = choice.loss
    name = f"{loss.kind} {loss.name!r}"
    if absent := [need for need in loss.needs if need not in inputs]:
        raise DataError(f"{name} needs {', '.join(absent)}; given: {', '.join(inputs) or 'nothing'}")
    if nothing := [need for need in loss.needs if inputs[need] is None]:
        raise DataError(f"{name} needs {', '.join(nothing)}; given None")
    known = [need for need in (*loss.needs, *loss.optional) if need in INPUTS]
    given = {need: inputs[need] for need in known if inputs.get(need) is not None}
    for need, x in given.items():
        _check_type(name, need, x)
    tensors = {need: x for need, x in given.items() if isinstance(x, Tensor)}
    _check_shapes(name, loss, tensors)
    if "student_logits" in tensors:
        check_top_k(choice, tensors["student_logits"].shape[-1])
    if values:
        _check_values(name, tensors)


def check_top_k(choice: Choice, vocabulary: int) -> None:
    """Raise ConfigError for a top-k larger than the vocabulary."""
    parameter = choice.loss.parameters.get("top_k")
    k = choice.params.get("top_k", parameter.default if parameter else None)
    if k is not None and k > vocabulary:
        raise ConfigError(
            f"{choice.loss.name}'s parameter 'top_k' is {k}, and the vocabulary has {vocabulary} entries"
        )


def _check_type(name: str, need: str, x: Any) -> None:
    shape, help_ = INPUTS[need]
    if not isinstance(x, OTHERS.get(shape, Tensor)) or isinstance(x, bool):
        wanted = shape if shape in OTHERS else f"a tensor {shape}: torch.as_tensor({need})"
        raise DataError(f"{name}: {need} is of type {type(x).__name__}; wanted {wanted}")
    if not isinstance(x, Tensor):
        return
    is_float = x.dtype.is_floating_point
    is_integer = not (is_float or x.dtype.is_complex or x.dtype is torch.bool)
    if need in BOOLEANS:
        sound, wanted = x.dtype is torch.bool, f"booleans: {need}.bool()"
    elif need in INTEGERS:
        sound, wanted = is_integer, f"integers: {need}.long()"
    elif need in EITHER:
        sound, wanted = is_integer or is_float, f"integers or floating point: {need}.long()"
    else:
        what = help_.partition(";")[0]
        sound, wanted = is_float, f"floating point: pass {what}, or {need}.float() if it is that"
    if not sound:
        raise DataError(f"{name}: {need} is {x.dtype}; wanted {wanted}")


def _shape(loss: Loss, need: str) -> str:
    """In the words of `inputs.py`: a mask over rollouts is that of an advantage which has no tokens."""
    others = [INPUTS[other].shape for other in loss.needs if other in INPUTS and other != "mask"]
    if need == "mask" and loss.kind == "advantage" and TOKENS not in others:
        return ROWS
    return INPUTS[need].shape


def _check_shapes(name: str, loss: Loss, tensors: Mapping[str, Tensor]) -> None:
    """Axes of one name have one size (`*batch` is any number of them); advantages broadcast."""
    first: dict[str, tuple[str, Any]] = {}

    def differ(need: str, other: str) -> NoReturn:
        raise DataError(
            f"{name}: {need} is {tuple(tensors[need].shape)} and {other} is {tuple(tensors[other].shape)}; "
            f"wanted {_shape(loss, need)} and {_shape(loss, other)} of one batch"
        )

    for need, x in tensors.items():
        if need == "advantages":
            continue
        for axis, size in _sizes(name, need, x, _shape(loss, need)).items():
            other, expected = first.setdefault(axis, (need, size))
            if size != expected and axis == "vocab":
                raise DataError(
                    f"{name}: vocabularies differ: {need} has {size} entries and {other} {expected}; pad the "
                    "smaller with -inf logits"
                )
            if size != expected:
                differ(need, other)
    if {"k", "vocab"} <= first.keys() and first["k"][1] > first["vocab"][1]:
        (top, k), (logits, vocabulary) = first["k"], first["vocab"]
        raise DataError(f"{name}: {top} has {k} entries, and the vocabulary of {logits} {vocabulary}")
    if "advantages" in tensors and "logprobs" in tensors:
        a, shape = tensors["advantages"].shape, tensors["logprobs"].shape
        if len(a) != len(shape) or any(n not in (1, m) for n, m in zip(a, shape, strict=True)):
            raise DataError(
                f"{name}: advantages {tuple(a)} do not broadcast against logprobs {tuple(shape)}; one per "
                "sequence is [B, 1]: advantages.unsqueeze(-1)"
            )


def _sizes(name: str, need: str, x: Tensor, shape: str) -> dict[str, Any]:
    """The size of each axis of `shape`, by its name."""
    axes = [axis for axis in shape.strip("[]").split(", ") if axis]
    named = [axis for axis in axes if axis != "*batch"]
    spare = x.dim() - len(named)
    if spare < 0 or (spare and axes == named):
        hint = "a tensor without axes" if not axes else f"{len(named)} axes"
        hint += " at least" if axes != named else ""
        raise DataError(f"{name}: {need} has shape {tuple(x.shape)}; wanted {shape}, {hint}")
    sizes: dict[str, Any] = dict(zip(named, x.shape[spare:], strict=True))
    return sizes if axes == named else {"*batch": x.shape[:spare], **sizes}


def _check_values(name: str, tensors: Mapping[str, Tensor]) -> None:
    for need, x in tensors.items():
        if need.endswith("logprobs"):
            _check_not_positive(name, need, _live(x, tensors.get("mask")))
    if {"teacher_topk_ids", "student_logits"} <= tensors.keys():
        vocabulary = tensors["student_logits"].shape[-1]
        ids = _live(tensors["teacher_topk_ids"], tensors.get("mask"))
        least, largest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if least < 0 or largest >= vocabulary > 0:
            raise DataError(
                f"{name}: teacher_topk_ids at live tokens are {least} to {largest}, and the vocabulary of "
                f"student_logits has {vocabulary} entries; teacher and student must share a tokenizer"
            )


def _live(x: Tensor, mask: Tensor | None) -> Tensor:
    """The values with 0 at masked tokens."""
    if mask is None:
        return x.detach()
    live = mask if x.dim() == mask.dim() else mask.unsqueeze(-1)
    return torch.where(live, x.detach(), torch.zeros_like(x))


def _check_not_positive(name: str, need: str, live: Tensor) -> None:
    numbers = torch.where(live.isnan(), torch.zeros_like(live), live)
    largest = float(numbers.max()) if live.numel() else 0.0
    if largest > min(ROUNDINGS * torch.finfo(live.dtype).eps, MOST):
        raise DataError(
            f"{name}: {need} holds {largest:.4g} at a live token; a log-probability is never positive: pass "
            "log pi(y_t), not probabilities, logits or negative log-likelihoods"
        )
