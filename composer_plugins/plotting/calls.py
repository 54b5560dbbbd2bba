"""How a chosen loss is called on many points at once."""

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses import calling
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import KINDS
from composer_plugins.testing.settings import main_tensor


def call(choice: Choice, inputs: dict[str, Tensor]) -> Tensor:
    """What a loss gives for these inputs; ConfigError where it needs another one."""
    if absent := [need for need in choice.loss.needs if need not in inputs]:
        problem = f"{choice.name} needs {' and '.join(absent)}, which the picture of "
        problem += f"{KINDS[choice.loss.kind].singular} does not have"
        raise ConfigError("plot", problem, f"it has {', '.join(inputs)}: draw a loss of these")
    return main_tensor(calling.call(choice, inputs))


def with_gradients(choice: Choice, inputs: dict[str, Tensor], *leaves: Tensor) -> list[Tensor]:
    """The loss of each row of `inputs`, and its gradient in each of the leaves.

    Each row is a batch of its own where the loss uses batch statistics.
    """

    def one(*row: Tensor) -> Tensor:
        batch = {name: x[None] for name, x in zip(inputs, row, strict=True)}
        return call(choice, batch)[0]

    loss: Tensor = torch.vmap(one)(*inputs.values()) if choice.loss.over_batch else call(choice, inputs)
    gradients = torch.autograd.grad(loss.sum(), leaves)
    return [found.squeeze(-1) if found.dim() > 1 else found for found in (loss.detach(), *gradients)]
