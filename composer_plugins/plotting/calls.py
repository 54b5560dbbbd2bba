"""How a chosen loss is called on many points at once."""

import torch
from torch import Tensor

from composer_plugins.catalogue import Choice
from composer_plugins.testing.settings import main_tensor


def one_by_one(choice: Choice, inputs: dict[str, Tensor]) -> Tensor:
    """The losses of the rows of `inputs`, each a batch of its own where the loss uses batch statistics."""
    if not choice.loss.over_batch:
        return main_tensor(choice.call(inputs))

    def one(*row: Tensor) -> Tensor:
        batch = {name: x[None] for name, x in zip(inputs, row, strict=True)}
        return main_tensor(choice.call(batch))[0]

    found: Tensor = torch.vmap(one)(*inputs.values())
    return found
