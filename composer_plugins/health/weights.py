"""Whether an update changes the weights: a sample of them before and after it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS, ELEMENTS = 16, 64  # so many parameters, and of each so many elements, evenly spaced


class Sample:
    """Some weights before an update, and where they have a gradient that is not 0."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = [one for one in parameters if one.requires_grad]
        some = trained[:: max(1, len(trained) // PARAMETERS)]
        with_gradient = [one for one in some if one.grad is not None]
        # Those on one device, as the weights of a model that is on several cannot be in one tensor.
        self.parameters = [one for one in with_gradient if one.device == with_gradient[0].device]
        self.before = _elements(self.parameters)
        self.has_gradient = _elements([one.grad for one in self.parameters]) != 0

    def compared(self) -> dict[str, Any]:
        """Return the counts of the weights with a gradient, and of those that have changed since."""
        moved = (_elements(self.parameters) != self.before) & self.has_gradient
        counts = {"with a gradient": self.has_gradient.sum(), "moved weights": moved.sum()}
        return {"low precision": float(any(x.dtype.itemsize < 4 for x in self.parameters)), **counts}


@torch.no_grad()
def _elements(tensors: Sequence[Any]) -> Tensor:
    parts = list[Tensor]()
    for x in tensors:
        flat = (x.to_local() if hasattr(x, "to_local") else x).reshape(-1)
        parts.append(flat[:: max(1, flat.numel() // ELEMENTS)])
    return torch.cat(parts) if parts else torch.zeros(0)
