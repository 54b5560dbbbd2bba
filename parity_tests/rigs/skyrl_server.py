"""SkyRL's Tinker-compatible server without a model: its parameters are the log-probabilities of the data."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The loss of a backend: (its name, the sequences as (log-probabilities, datum)) -> the loss of a request.
Backend = Callable[[str, list[tuple[Tensor, Any]]], Tensor]


def entry(datum: Any, name: str) -> Tensor:
    """An entry of the data that a client has sent."""
    found: Tensor = datum.loss_fn_inputs[name].to_torch()
    return found


class Server:
    """A server and its client. The gradients of all requests add up in `logprobs`."""

    def __init__(self, logprobs: Sequence[Tensor], backend: Backend) -> None:
        self.logprobs = [one.clone().requires_grad_() for one in logprobs]
        self.backend, self.sequences = backend, 0

    def forward(self, data: Sequence[Any], loss_fn: str) -> Any:
        """The log-probabilities of these data."""
        outputs = [{"logprobs": SimpleNamespace(data=self.of(one).tolist())} for one in data]
        return SimpleNamespace(result=lambda: SimpleNamespace(loss_fn_outputs=outputs))

    def of(self, datum: Any) -> Tensor:
        """The parameters that are the log-probabilities of this datum, by its number of tokens."""
        (found,) = [x for x in self.logprobs if len(x) == len(datum.model_input.tokens)]
        return found

    def forward_backward(self, data: Sequence[Any], loss_fn: str) -> Any:
        """Add the gradient of the backend's loss."""
        self.backend(loss_fn, [(self.of(one), one) for one in data]).backward()  # type: ignore[no-untyped-call]
        self.sequences += len(data)
        return SimpleNamespace(result=lambda: None)

    def gradients(self, divisor: float = 1.0) -> list[Tensor]:
        """What the optimizer gets."""
        return [torch.zeros_like(x) if x.grad is None else x.grad / divisor for x in self.logprobs]
