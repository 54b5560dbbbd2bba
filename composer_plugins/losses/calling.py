"""Call a chosen loss with a framework's tensors. Kernels check none of them: that waits for the device.

An adapter checks its first batch (`call(..., check=True)`). Nothing is converted: a mask of floats or
log-probabilities of integers are a mistake of the caller, and the error says so.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.inputs import (
    BOOLEAN,
    COUNT,
    FLOAT,
    INPUTS,
    INTEGER,
    LARGEST_LOGPROB,
    ROWS,
    TOKENS,
    positive_logprob,
)
from composer_plugins.losses.row import Loss

ROUNDINGS = 64  # so many units in the last place may equal advantages differ by
NOT_TENSORS: dict[str, type] = {"a torch.Generator": torch.Generator, "an int": int}


def call(choice: Choice, tensors: Mapping[str, Any], *, check: bool = False, **params: Any) -> Any:
    """Call the kernel with a framework's tensors, by their names in `inputs.INPUTS`.

    Every needed input goes in by position, and every taken one that `tensors` has by keyword. `params`
    replace the chosen ones. With `check` the tensors are checked first (`check_inputs`), which waits for the
    device: an adapter does so on its first batch. The result is then checked too. The result of a kernel
    that is not of this package is always checked.
    """
    if check:
        check_inputs(choice, tensors)
    is_third_party = choice.is_third_party
    before = versions(tensors) if is_third_party else {}
    result = call_unchecked(choice, tensors, **params)
    if check or is_third_party:
        check_result(choice, tensors, result)
        check_not_written(choice, tensors, before)
    return result


def call_unchecked(choice: Choice, tensors: Mapping[str, Any], **params: Any) -> Any:
    """Call the kernel as `call` does, and check neither what it takes nor what it returns."""
    needed = [tensors[name] for name in choice.loss.needs]
    optional = choice.optional
    taken = {name: tensors[name] for name in optional if name in tensors} if optional else {}
    return choice.loss.kernel()(*needed, **taken, **{**choice.params, **params})


def check_inputs(choice: Choice, inputs: Mapping[str, Any]) -> None:
    """Raise DataError unless these tensors, by their names in the catalogue, are what the loss takes.

    Checked are presence, dtype, shape, a top-k no larger than the vocabulary (`top_k`: ConfigError); and
    of values, at unmasked tokens, that log-probabilities are not positive, that ids are within the
    vocabulary, and that a loss per sequence gets one advantage per sequence. The values wait for the
    device. NaN passes: the loss shows it.
    """
    loss = choice.loss
    name = f"{loss.kind} {loss.name!r}"
    if absent := [need for need in loss.needs if inputs.get(need) is None]:
        given = ", ".join(key for key, x in inputs.items() if x is not None) or "nothing"
        raise DataError(name, f"it needs {', '.join(absent)}, and the batch has {given}", "pass them")
    known = [need for need in (*loss.needs, *loss.optional) if need in INPUTS]
    present = {need: inputs[need] for need in known if inputs.get(need) is not None}
    try:
        for need, x in present.items():
            _check_type(need, x)
        tensors = {need: x for need, x in present.items() if isinstance(x, Tensor)}
        _check_shapes(loss, tensors)
        _check_values(tensors)
    except DataError as error:
        raise error.under(name, ", ") from None
    if loss.per_sequence and differ_by_token(tensors["advantages"], tensors["mask"]):
        raise differing_advantages(loss)
    if "student_logits" in tensors:
        check_top_k(choice, tensors["student_logits"].shape[-1])


def check_result(choice: Choice, inputs: Mapping[str, Any], result: Any) -> None:
    """Raise ConfigError unless a loss returned one value per token (or pair, or row), with its gradient.

    Shapes and types are looked at, which does not wait for the device.
    """
    kind, first = choice.loss.kind, inputs[choice.loss.needs[0]]
    like = first if kind == "preference" else inputs.get("mask")
    if kind not in ("policy", "divergence", "preference", "advantage") or not isinstance(like, Tensor):
        return
    unit, returned = {
        "preference": ("pair", "PairLoss(loss, metrics)"),
        "advantage": ("row or token", "a tensor"),
    }.get(kind, ("token", "TokenLoss(loss, metrics)"))
    wanted, loss = tuple(like.shape), result if kind == "advantage" else getattr(result, "loss", None)
    metrics = {} if kind == "advantage" else getattr(result, "metrics", None)
    remedy = f"return {returned}, with one value per {unit}"
    if not isinstance(loss, Tensor) or not isinstance(metrics, dict):
        raise ConfigError(choice.option, f"{choice.name!r} returned {type(result).__name__}", remedy)
    if tuple(loss.shape) != wanted:
        problem = f"{choice.name!r} returned the shape {list(loss.shape)}, and not {list(wanted)}"
        raise ConfigError(choice.option, problem, remedy)
    for name, metric in metrics.items():
        pair = metric if isinstance(metric, tuple) and len(metric) == 2 else ()
        if not pair or not all(isinstance(x, Tensor) for x in pair):
            problem = f"{choice.name!r} returned the metric {name!r} as {type(metric).__name__}"
            raise ConfigError(choice.option, problem, "return Metric(value, where), two tensors")
        if not all(_broadcasts(x, wanted) for x in pair) or pair[1].dtype is not torch.bool:
            problem = f"{choice.name!r} returned the metric {name!r} with shapes or a dtype that do not fit"
            remedy = f"return Metric(value, where), both {list(wanted)}, `where` of booleans"
            raise ConfigError(choice.option, problem, remedy)
        if name == "loss":
            problem = f"{choice.name!r} returned a metric 'loss', the name under which the loss is logged"
            raise ConfigError(choice.option, problem, "give the metric another name")
    if torch.is_grad_enabled() and first.requires_grad and kind != "advantage" and not loss.requires_grad:
        problem = f"the loss that {choice.name!r} returned has no gradient"
        raise ConfigError(choice.option, problem, f"compute it from {choice.loss.needs[0]}, not detached")


def versions(inputs: Mapping[str, Any]) -> dict[str, int]:
    """How often each tensor was written to, as autograd counts it."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and not x.is_inference()}
    return {name: x._version for name, x in tensors.items()}


def check_not_written(choice: Choice, inputs: Mapping[str, Any], before: Mapping[str, int]) -> None:
    """Raise ConfigError if a loss has written to one of its inputs since `versions` gave `before`."""
    now = versions(inputs)
    if written := [name for name, version in before.items() if now[name] != version]:
        problem = f"{choice.name!r} writes to its input {written[0]!r}, which the framework goes on to use"
        raise ConfigError(choice.option, problem, f"compute on a copy: {written[0]}.clone()")


def check_top_k(choice: Choice, vocabulary: int, entries: str = "entries of the vocabulary") -> None:
    """Raise ConfigError for a top-k larger than the vocabulary, or than the `entries` that there are."""
    k = choice.value("top_k")
    if k is not None and k > vocabulary:
        problem = f"{k} is more than the {vocabulary} {entries}"
        raise ConfigError(f"{choice.params_option}.top_k", problem, f"set it to at most {vocabulary}")


def _check_type(need: str, x: Any) -> None:
    shape, meaning, dtype = INPUTS[need]
    if not isinstance(x, NOT_TENSORS.get(shape, Tensor)) or isinstance(x, bool):
        wanted = shape if shape in NOT_TENSORS else f"a tensor {shape}: torch.as_tensor({need})"
        raise DataError(need, f"it is of type {type(x).__name__}", f"pass {wanted}")
    if not isinstance(x, Tensor):
        return
    is_float = x.dtype.is_floating_point
    is_integer = not (is_float or x.dtype.is_complex or x.dtype is torch.bool)
    is_sound, wanted = {
        FLOAT: (is_float, f"floating-point numbers: {meaning}"),
        BOOLEAN: (x.dtype is torch.bool, f"booleans: {need}.bool()"),
        INTEGER: (is_integer, f"integers: {need}.long()"),
        COUNT: (is_integer or is_float, f"integers or floating-point numbers: {need}.long()"),
    }[dtype]
    if not is_sound:
        raise DataError(need, f"it is {x.dtype}", f"pass {wanted}")


def _shape(loss: Loss, need: str) -> str:
    """The shape as `inputs.py` writes it. The mask of an advantage without tokens is one over rollouts."""
    others = [INPUTS[other].shape for other in loss.needs if other in INPUTS and other != "mask"]
    if need == "mask" and loss.kind == "advantage" and TOKENS not in others:
        return ROWS
    return INPUTS[need].shape


def _check_shapes(loss: Loss, tensors: Mapping[str, Tensor]) -> None:
    """Raise DataError unless axes of one name have one size (`*batch` is any number of axes)."""
    first: dict[str, tuple[str, Any]] = {}
    for need, x in tensors.items():
        if need == "advantages":
            continue
        for axis, size in _sizes(need, x, _shape(loss, need)).items():
            other, expected = first.setdefault(axis, (need, size))
            if size != expected and axis == "vocab":
                problem = f"its vocabulary has {size} entries, and the vocabulary of {other} {expected}"
                raise DataError(need, problem, "pad the smaller one with -inf logits")
            if size != expected:
                problem = f"it is {tuple(x.shape)}, and {other} is {tuple(tensors[other].shape)}"
                remedy = f"pass {_shape(loss, need)} and {_shape(loss, other)} of one batch"
                raise DataError(need, problem, remedy)
    if {"k", "vocab"} <= first.keys() and first["k"][1] > first["vocab"][1]:
        (top, k), (logits, vocabulary) = first["k"], first["vocab"]
        problem = f"it has {k} entries, and the vocabulary of {logits} {vocabulary}"
        raise DataError(top, problem, "pass no more entries than the vocabulary has")
    if "advantages" in tensors and "logprobs" in tensors:
        shape = tuple(tensors["logprobs"].shape)
        if not _broadcasts(tensors["advantages"], shape):
            problem = f"{tuple(tensors['advantages'].shape)} does not broadcast against logprobs {shape}"
            raise DataError(
                "advantages", problem, "pass one per sequence as [B, 1]: advantages.unsqueeze(-1)"
            )


def _broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == len(shape) and all(n in (1, m) for n, m in zip(x.shape, shape, strict=True))


def _sizes(need: str, x: Tensor, shape: str) -> dict[str, Any]:
    """The size of each axis of `shape`, by its name."""
    axes = [axis for axis in shape.strip("[]").split(", ") if axis]
    named = [axis for axis in axes if axis != "*batch"]
    spare = x.dim() - len(named)
    if spare < 0 or (spare and axes == named):
        hint = "a tensor without axes" if not axes else f"{len(named)} ax{'i' if len(named) == 1 else 'e'}s"
        hint += " at least" if axes != named else ""
        raise DataError(need, f"its shape is {tuple(x.shape)}", f"pass {shape}, {hint}")
    sizes: dict[str, Any] = dict(zip(named, x.shape[spare:], strict=True))
    return sizes if axes == named else {"*batch": x.shape[:spare], **sizes}


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for need, x in tensors.items():
        if need.endswith("logprobs"):
            _check_not_positive(need, _unmasked(x, tensors.get("mask")))
    if {"teacher_topk_ids", "student_logits"} <= tensors.keys():
        vocabulary = tensors["student_logits"].shape[-1]
        ids = _unmasked(tensors["teacher_topk_ids"], tensors.get("mask"))
        least, largest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if least < 0 or largest >= vocabulary > 0:
            problem = f"they go from {least} to {largest}, and student_logits has {vocabulary} entries"
            raise DataError("teacher_topk_ids", problem, "use a teacher with the student's tokenizer")


def differing_advantages(loss: Loss) -> DataError:
    """The error for a loss per sequence of which the advantages differ by token (`differ_by_token`)."""
    problem = "they differ within a sequence, and this loss averages them over the sequence"
    remedy = "choose a loss with one ratio per token, or gspo_token"
    return DataError(f"{loss.kind} {loss.name!r}, advantages", problem, remedy)


def differ_by_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Whether the advantages of any row's unmasked tokens differ by more than rounding, a boolean []."""
    advantages, mask = torch.broadcast_tensors(advantages.detach(), mask)
    highest = torch.where(mask, advantages, -torch.inf).amax(-1)
    lowest = torch.where(mask, advantages, torch.inf).amin(-1)
    rounding = ROUNDINGS * torch.finfo(advantages.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
    return (highest - lowest > rounding).any()


def _unmasked(x: Tensor, mask: Tensor | None) -> Tensor:
    """The values, 0 at masked tokens."""
    if mask is None:
        return x.detach()
    where = mask if x.dim() == mask.dim() else mask.unsqueeze(-1)
    return torch.where(where, x.detach(), torch.zeros_like(x))


def _check_not_positive(need: str, x: Tensor) -> None:
    numbers = torch.where(x.isnan(), torch.zeros_like(x), x)
    largest = float(numbers.max()) if x.numel() else 0.0
    if largest > LARGEST_LOGPROB:
        raise positive_logprob(need, f"{largest:.4g} at an unmasked token")
