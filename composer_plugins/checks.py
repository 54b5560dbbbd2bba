"""What kernels do not check, because it would cost a device sync: the tensors they are fed with.

An adapter calls `check_inputs` once, on its first batch. Nothing is coerced: a mask of floats or
log-probabilities of integers is a mistake upstream of us, and the error says so.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer_plugins.catalogue import Choice
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.inputs import INPUTS, PAIRS, ROWS, TOKENS, TOP_K, VOCAB

BOOLEANS = {"mask", "desirable", "component_mask"}
INTEGERS = {"group_ids", "teacher_topk_ids", "student_topk_ids"}
LEADING_AXES = {TOKENS: 0, VOCAB: 1, TOP_K: 1, PAIRS: 0, ROWS: 0}  # how many axes follow [*batch, tokens]

# How far above 0 a log-probability may stand by rounding: a few units in the last place of the largest
# term of a log-softmax, which is a difference of logits of some tens.
ROUNDINGS = 64


def check_inputs(choice: Choice, inputs: Mapping[str, Any]) -> None:
    """Raise DataError unless these tensors, by their names in the catalogue, are what the loss takes.

    Checked are presence, dtype, shape, a top-k no larger than the vocabulary, and that log-probabilities
    at live tokens are not positive. NaN passes: it is the loss that must show it.
    """
    name = f"{choice.loss.kind} {choice.loss.name!r}"
    if absent := [need for need in choice.loss.needs if need not in inputs]:
        raise DataError(f"{name} needs {', '.join(absent)}; given: {', '.join(inputs)}")
    wanted = [need for need in (*choice.loss.needs, *choice.loss.optional) if inputs.get(need) is not None]
    tensors = {need: inputs[need] for need in wanted if isinstance(inputs[need], Tensor)}
    for need, x in tensors.items():
        _check_dtype(name, need, x)
    _check_shapes(name, tensors)
    _check_top_k(choice, tensors)
    mask = tensors.get("mask")
    for need, x in tensors.items():
        if need.endswith("logprobs"):
            _check_not_positive(name, need, x, mask)


def _check_dtype(name: str, need: str, x: Tensor) -> None:
    if need in BOOLEANS:
        sound, wanted = x.dtype is torch.bool, f"booleans: {need}.bool()"
    elif need in INTEGERS:
        sound, wanted = not x.dtype.is_floating_point and x.dtype is not torch.bool, "integers"
    else:
        sound, wanted = x.dtype.is_floating_point, "floating point"
    if not sound:
        raise DataError(f"{name}: {need} is {x.dtype}; wanted {wanted}")


def _check_shapes(name: str, tensors: Mapping[str, Tensor]) -> None:
    """All inputs over tokens (pairs, rows) have one shape; advantages broadcast against it."""
    first: dict[str, tuple[str, torch.Size]] = {}
    for need, x in tensors.items():
        if need == "advantages" or need not in INPUTS or (kind := INPUTS[need].shape) not in LEADING_AXES:
            continue
        trailing = LEADING_AXES[kind]
        if x.dim() <= trailing:
            raise DataError(f"{name}: {need} has shape {tuple(x.shape)}; wanted {kind}")
        shape = x.shape[: x.dim() - trailing]
        other, expected = first.setdefault("", (need, shape))
        if shape != expected:
            raise DataError(
                f"{name}: {need} is {tuple(x.shape)} and {other} is {tuple(tensors[other].shape)}; wanted "
                f"{INPUTS[need].shape} and {INPUTS[other].shape} of one batch"
            )
    if "advantages" in tensors and "logprobs" in tensors:
        a, shape = tensors["advantages"].shape, tensors["logprobs"].shape
        if len(a) != len(shape) or any(n not in (1, m) for n, m in zip(a, shape, strict=True)):
            raise DataError(
                f"{name}: advantages {tuple(a)} do not broadcast against logprobs {tuple(shape)}; one per "
                "sequence is [B, 1]: advantages.unsqueeze(-1)"
            )
    vocabularies = {need: x.shape[-1] for need, x in tensors.items() if INPUTS[need].shape == VOCAB}
    if len(set(vocabularies.values())) > 1:
        raise DataError(f"{name}: vocabularies differ: {vocabularies}; pad the smaller with -inf logits")


def _check_top_k(choice: Choice, tensors: Mapping[str, Tensor]) -> None:
    if "student_logits" in tensors:
        check_top_k(choice, tensors["student_logits"].shape[-1])


def check_top_k(choice: Choice, vocabulary: int) -> None:
    """Raise ConfigError for a top-k larger than the vocabulary."""
    parameter = choice.loss.parameters.get("top_k")
    k = choice.params.get("top_k", parameter.default if parameter else None)
    if k is not None and k > vocabulary:
        raise ConfigError(
            f"{choice.loss.name}'s parameter 'top_k' is {k}, and the vocabulary has {vocabulary} entries"
        )


def _check_not_positive(name: str, need: str, x: Tensor, mask: Tensor | None) -> None:
    live = x if mask is None or mask.shape != x.shape else torch.where(mask, x, 0.0)
    largest = float(live.detach().nan_to_num(nan=0.0).max()) if x.numel() else 0.0
    if largest > ROUNDINGS * torch.finfo(x.dtype).eps:
        raise DataError(
            f"{name}: {need} holds {largest:.4g} at a live token; a log-probability is never positive: pass "
            "log pi(y_t), not probabilities, logits or negative log-likelihoods"
        )
