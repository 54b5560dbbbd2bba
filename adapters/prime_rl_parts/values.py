"""What may stand in a stream of per-token numbers before it is stamped on a node or stored."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from composer_plugins.errors import DataError

ROUNDING = 1e-5  # nats by which a log-probability of an engine may exceed 0
MARKED = 0.5  # above it a reference is no log-probability but the mark of a pair

Array: TypeAlias = np.ndarray[Any, Any]


def reference_values(values: Sequence[float] | Array, count: int, what: str) -> Array:
    """`values` as `count` log-probabilities of a teacher, float64 and at most 0; DataError otherwise."""
    array = log_probabilities(values, count, what)
    if not array.any():
        raise DataError(
            f"{what}: every log-probability is exactly 0.0, which reads as no reference, for packing writes "
            "0.0 where a sequence has none. Of a teacher that is as certain as that, pass -1e-9 for 0.0"
        )
    return array


def log_probabilities(values: Sequence[float] | Array, count: int, what: str) -> Array:
    """`values` as `count` log-probabilities; what exceeds 0 by rounding only becomes 0."""
    array = numbers(values, count, what)
    if (wrong := array > ROUNDING).any():
        raise DataError(
            f"{what}: {array[wrong][0]} at position {wrong.argmax()} is positive: not a log-probability"
        )
    return np.minimum(array, 0.0)


def numbers(values: Sequence[float] | Array, count: int, what: str) -> Array:
    """`values` as `count` finite float64 numbers."""
    array = of_kind(values, "fiu", f"{what}: {count} numbers").astype(np.float64)
    if array.shape != (count,):
        raise DataError(f"{what}: {count} numbers wanted, one per token, not shape {array.shape}")
    if (wrong := ~np.isfinite(array)).any():
        raise DataError(f"{what}: {array[wrong][0]} at position {wrong.argmax()} is not a finite number")
    return array


def of_kind(values: Any, kinds: str, what: str) -> Array:
    """`values` as an array with one dimension, of these of numpy's kinds: no text, no truth value."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{what} wanted, not lists of several lengths") from None
    booleans = isinstance(values, list | tuple) and any(isinstance(value, bool) for value in values)
    if array.ndim != 1 or array.dtype.kind not in kinds or booleans:
        given = "bool" if booleans else array.dtype
        raise DataError(f"{what} wanted, not {given} of shape {array.shape}")
    return array
