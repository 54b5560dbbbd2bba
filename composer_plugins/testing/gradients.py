"""Values and gradients of a loss at drawn inputs."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from composer_plugins.testing.inputs import Batch, float_tensors

if TYPE_CHECKING:
    from composer_plugins.testing.settings import Setting


def with_trained_gradients(setting: "Setting", batch: Batch) -> Batch:
    """The batch with `requires_grad` on copies of the inputs that the setting trains."""
    return batch | {name: batch[name].detach().clone().requires_grad_() for name in setting.trained}


def with_all_gradients(batch: Batch) -> Batch:
    """The batch with `requires_grad` on copies of all floating-point tensors."""
    return batch | {name: x.detach().clone().requires_grad_() for name, x in float_tensors(batch).items()}


def value_and_gradients(
    setting: "Setting", batch: Batch, weight: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result, and the gradient of its sum (weighted by `weight`) in each trained input."""
    batch = with_trained_gradients(setting, batch)
    result = setting.result(batch)
    total = (result if weight is None else torch.where(result == 0, 0.0, weight) * result).sum()
    wanted = {name: batch[name] for name in setting.trained}
    if not total.requires_grad:
        return result, {name: torch.zeros_like(x) for name, x in wanted.items()}
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True)
    return result.detach(), dict(zip(wanted, found, strict=True))
