"""Logits as verl's engine makes them, and a cross-entropy that overwrites them as on a GPU: without verl."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32

# A new tensor; a view, with use_remove_padding; and what no engine of verl's does, a part of a larger tensor
# or another order of the entries.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "new": lambda x: x * 1,
    "view": lambda x: (x * 1).unsqueeze(0).squeeze(0),
    "part": lambda x: torch.cat([x, x], -1)[:, : x.shape[-1]],
    "rows": lambda x: torch.cat([x, x])[: len(x)],
    "transposed": lambda x: x.t().contiguous().t(),
}


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    """log pi of the labels."""
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def overwriting(logits: Tensor, labels: Tensor) -> Tensor:
    """log pi of the labels in float32 at least; the backward writes the logits' gradient over the logits.

    So does the cross-entropy of flash-attn, which verl calls on a GPU with inplace_backward=True. The version
    of the logits does not change, so autograd does not notice.
    """
    result: Tensor = _Overwriting.apply(logits, labels)  # type: ignore[no-untyped-call]
    return result


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        norms = torch.stack([at_least_float32(row).logsumexp(-1) for row in logits])
        ctx.save_for_backward(logits, labels, norms)
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - norms

    @staticmethod
    def backward(ctx: Any, *by_logprobs: Tensor) -> tuple[Tensor, None]:
        logits, labels, norms = ctx.saved_tensors
        for row, label, norm, slope in zip(logits.data, labels, norms, by_logprobs[0], strict=True):
            p = (at_least_float32(row) - norm).exp()
            p[label] -= 1
            row.copy_(-slope * p)
        return logits, None
