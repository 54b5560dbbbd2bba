"""What a loss function gets from Tinker's SDK: data with `loss_fn_inputs`, and their log-probabilities.

The SDK is not imported: a Datum has `model_input` and `loss_fn_inputs`, a mapping of TensorData with
`to_torch()`. Read in tinker 0.38.0 and 0.18.2.
"""

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.errors import DataError
from composer_plugins.losses.inputs import LARGEST_LOGPROB, positive_logprob
from composer_plugins.losses.masks import boolean_mask

TARGETS = "target_tokens"
Call = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


class Requests(NamedTuple):
    """The requests of one `forward_backward_custom`. A client numbers all requests that train its model."""

    client: "weakref.ref[Any]"
    first: int
    following: int  # the number of the client's next request

    @classmethod
    def of_this_call(cls) -> "Requests | None":
        """Those of the call that runs this function; None if it is not a call of tinker 0.38.

        The SDK hands a loss neither its client nor a number, so both are read in the SDK's own frame. It
        reserves a forward and a backward request for each chunk of the data before it sends anything.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_name != "run_reserved_operation":
            frame = frame.f_back
        try:
            found = frame.f_locals if frame is not None else {}
            client, chunks = found["self"], found["forward_requests"]
            first = chunks[0].request_id
            return cls(weakref.ref(client), first, first + 2 * len(chunks))
        except (LookupError, AttributeError, TypeError):  # of another release, or of no SDK
            return None

    def follow(self, others: "Requests | None") -> bool:
        """Whether the client sent nothing between the others and these."""
        return others is not None and (self.client, self.first) == (others.client, others.following)


def entry(data: Sequence[Any], row: int, key: str, remedy: str) -> Tensor:
    """The entry `key` of one datum; DataError with this remedy where it has none."""
    found = data[row].loss_fn_inputs.get(key)
    if found is None:
        present = ", ".join(data[row].loss_fn_inputs) or "nothing"
        raise DataError(place(row, key), f"it is absent, and the datum has {present}", remedy)
    tensor: Tensor = found.to_torch()
    return tensor


def targets_of(data: Sequence[Any], row: int) -> Tensor:
    """The tokens that the log-probabilities of one datum are of."""
    targets: Tensor = data[row].loss_fn_inputs[TARGETS].to_torch()
    return targets


def place(row: int, key: str) -> str:
    """Where an entry stands, for an error."""
    return f"data[{row}].loss_fn_inputs[{key!r}]"


def read_mask(data: Sequence[Any], row: int, key: str) -> Tensor:
    """The mask of one datum, [tokens] of booleans: which targets are of the completion."""
    remedy = "add a 1 for each target of the completion, and a 0 for each of the prompt"
    if "weights" in data[row].loss_fn_inputs:
        remedy += ", or, if the weights are 0 and 1, set entries={'mask': 'weights'} of loss_fn and "
        remedy += "mask='weights' of the functions that fill the data"
    mask = boolean_mask(place(row, key), entry(data, row, key, remedy), check=True)
    targets = targets_of(data, row)
    if targets.dim() != 1:
        problem = f"its shape is {list(targets.shape)}"
        raise DataError(place(row, TARGETS), problem, "use one target per position: [tokens]")
    if mask.shape != targets.shape:
        problem = f"its shape is {list(mask.shape)}, and {TARGETS} has {list(targets.shape)}"
        raise DataError(place(row, key), problem, "write one number for each target")
    return mask


def pair_weight(where: str, x: Any) -> float:
    """The weight of a pair; DataError at `where` unless it is finite and at least 0."""
    weight = float(x)
    if not 0 <= weight < math.inf:
        remedy = "write a finite number of at least 0: 0 takes the pair out"
        raise DataError(where, f"it is {weight:g}", remedy)
    return weight


class Batch(NamedTuple):
    """The log-probabilities of one call, padded to [B, T], and the data that the other inputs come from."""

    data: Sequence[Any]
    logprobs: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, data: Sequence[Any], logprobs: Sequence[Tensor], mask: Tensor) -> "Batch":
        """The batch, checked; `mask` [B, T] says which tokens some channel trains."""
        if len(data) != len(logprobs):
            problem = f"there are {len(logprobs)}, and {len(data)} data"
            raise DataError("logprobs", problem, "pass the data and the log-probabilities of one call")
        lengths = [len(one) for one in logprobs]
        for row, length in enumerate(lengths):
            if length != (targets := len(targets_of(data, row))):
                problem = f"it has {length} numbers, and the datum {targets} targets"
                raise DataError(f"logprobs[{row}]", problem, "pass the data of the same call")
        batch = cls(data, pad_sequence([*logprobs], batch_first=True), lengths)
        for row in range(len(data)):
            check_values(f"logprobs[{row}]", batch.logprobs[row], mask[row], is_logprob=True)
        return batch

    def tokens(self, key: str, mask: Tensor, remedy: str, *, is_logprob: bool = True) -> Tensor:
        """An entry of every row with an unmasked token, padded to [B, T]; 0 in the other rows."""
        rows = []
        for row, length in enumerate(self.lengths):
            if not bool(mask[row].any()):
                rows.append(self.logprobs.new_zeros(length))
                continue
            found = entry(self.data, row, key, remedy)
            if list(found.shape) != [length]:
                problem = f"its shape is {list(found.shape)}, and the datum has {length} targets"
                raise DataError(place(row, key), problem, "write one number for each target")
            check_values(place(row, key), found, mask[row, :length], is_logprob=is_logprob)
            rows.append(found.to(self.logprobs.dtype))
        return pad_sequence(rows, batch_first=True)


def check_values(where: str, x: Tensor, mask: Tensor, *, is_logprob: bool) -> None:
    """Raise DataError unless the numbers at unmasked tokens are finite, and log-probabilities possible."""
    unmasked = x.detach()[mask]
    if not bool(unmasked.isfinite().all()):
        number = float(unmasked[~unmasked.isfinite()][0])
        problem = f"it holds {number} at an unmasked token"
        raise DataError(where, problem, "mask the token out, or find out where the number comes from")
    if is_logprob and unmasked.numel() and (largest := float(unmasked.max())) > LARGEST_LOGPROB:
        raise positive_logprob(where, f"{largest:.4g} at an unmasked token")


def with_entries(datum: Any, entries: Mapping[str, Tensor]) -> Any:
    """The datum with these entries added to its `loss_fn_inputs`, or in their place."""
    inputs = {**datum.loss_fn_inputs, **entries}
    if is_dataclass(datum):  # which keeps the spans of a Datum of 0.38
        return replace(datum, loss_fn_inputs=inputs)  # type: ignore[type-var]
    return type(datum)(model_input=datum.model_input, loss_fn_inputs=inputs)


def inputs_apart(data: Sequence[Any], loss: Call) -> tuple[list[Any], Call]:
    """Data with their targets alone, and the loss that reads the other entries from the given data.

    For an SDK that rejects other entries, as 0.18.2: `forward_backward_custom(*inputs_apart(data, loss))`.
    """
    bare = [
        type(one)(model_input=one.model_input, loss_fn_inputs={TARGETS: one.loss_fn_inputs[TARGETS]})
        for one in data
    ]
    return bare, lambda _, logprobs: loss(data, logprobs)
