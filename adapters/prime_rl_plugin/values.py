"""The per-token numbers that reach the loss through PRIME-RL, and the checks on them.

PRIME-RL passes two numbers per token to the loss: a reference log-probability and a weight. For a
hint the reference is the teacher's log-probability, which is at most 0. A token of a replayed pair needs no
reference. There the positive number `REPLAY` marks the token, and the weight is the pair's signed
coefficient. PRIME-RL's packing writes 0.0 at every token of a sequence that has no reference.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from composer_plugins.errors import DataError
from composer_plugins.losses.inputs import LARGEST_LOGPROB, positive_logprob

if TYPE_CHECKING:  # the store and the stamps run where torch need not be loaded
    from torch import Tensor

REPLAY = 1.0  # the reference that marks a token of a pair
SMALLEST = float(np.finfo(np.float32).tiny)  # PRIME-RL's streams are float32
RUN = 8  # so many neighbouring tokens with the reference 0.0 are hardly a teacher's, who is certain of each
MARKED = 0.5  # a reference above this is the mark; one that is a little above 0 was rounded by its engine

Array: TypeAlias = np.ndarray[Any, Any]


def is_replay(reference: "Tensor") -> "Tensor":
    """Where a token belongs to a replayed pair."""
    return reference > MARKED


def has_reference(reference: "Tensor", mask: "Tensor") -> "Tensor":
    """Whether the unmasked tokens have a reference, as a 0-dimensional boolean on their device.

    A single 0.0 is a teacher's probability of 1. 0.0 at every token means no reference.
    """
    return (mask & (reference != 0)).any()


def is_stamped_in_part(reference: "Tensor", mask: "Tensor") -> "Tensor":
    """Whether `RUN` neighbouring tokens that have a reference have exactly 0.0."""
    return (mask & (reference == 0)).unfold(-1, RUN, 1).all(-1).any()


def is_no_logprob(reference: "Tensor", mask: "Tensor") -> "Tensor":
    """Whether an unmasked token has a positive reference that is not the mark of a pair."""
    return (mask & (reference > LARGEST_LOGPROB) & (reference != REPLAY)).any()


def reference_values(values: Sequence[float] | Array, count: int, key: str) -> Array:
    """`values` as `count` log-probabilities of a teacher, float64 and at most 0; DataError otherwise."""
    array = log_probabilities(values, count, key)
    if not array.astype(np.float32).any():
        problem = "every log-probability is exactly 0.0 in float32, which to PRIME-RL's packing means no "
        problem += "reference"
        raise DataError(key, problem, "pass -1e-9 for 0.0 if the teacher is certain of every token")
    return array


def stamped(references: Array) -> Array:
    """The log-probabilities as they are stamped: not 0.0, which PRIME-RL writes where no stamp is."""
    return np.where(references.astype(np.float32) == 0, -SMALLEST, references)


def log_probabilities(values: Sequence[float] | Array, count: int, key: str) -> Array:
    """`values` as `count` log-probabilities; what exceeds 0 only by rounding becomes 0."""
    array = numbers(values, count, key)
    if (wrong := array > LARGEST_LOGPROB).any():
        raise positive_logprob(key, f"{array[wrong][0]} at position {wrong.argmax()}")
    return np.minimum(array, 0.0)


def numbers(values: Sequence[float] | Array, count: int, key: str) -> Array:
    """`values` as `count` float64 numbers that are finite in float32 too: PRIME-RL's streams are float32."""
    array = np.asarray(values, np.float64)
    if array.shape != (count,):
        raise DataError(key, f"{array.size} numbers for {count} tokens", "pass one number per token")
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(array.astype(np.float32))
    if wrong.any():
        remedy = "pass finite numbers, within the range of float32"
        raise DataError(key, f"{array[wrong][0]} at position {wrong.argmax()}", remedy)
    return array
