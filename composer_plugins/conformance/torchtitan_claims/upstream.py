"""The installed torchtitan, called on drawn micro-batches.

The package of its RL imports vLLM, which its losses do not need. They are loaded without that package.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from composer_plugins.frameworks.torchtitan import LOSS, TORCHTITAN
from composer_plugins.losses.choosing import find_one

RL = "torchtitan.experiments.rl"


def modules() -> ModuleType:
    """`torchtitan.experiments.rl.losses`; where vLLM is absent, without what the package of RL imports."""
    if RL not in sys.modules and find_spec("vllm") is None:
        root = find_spec("torchtitan")
        assert root is not None and root.submodule_search_locations
        package = ModuleType(RL)
        package.__path__ = [str(Path(root.submodule_search_locations[0], "experiments", "rl"))]
        sys.modules[RL] = package
    return import_module(f"{RL}.losses")


def loss_class(name: str) -> Any:
    """A class of torchtitan by the name that the table has for it."""
    return getattr(modules(), name)


def classes() -> set[str]:
    """The losses of RL that this torchtitan has."""
    return {one for one in getattr(modules(), "__all__", ()) if one.endswith("Loss")}


def our_params(row: str, options: dict[str, float]) -> dict[str, Any]:
    """torchtitan's options as parameters of our losses, by the table that users run."""
    return TORCHTITAN.parameters(find_one(row, "policy").loss, options)


def row_of(name: str) -> str:
    """The row of a class."""
    return next(one.row for one in TORCHTITAN.losses if one.options[LOSS] == name)


def called(loss: Any, batch: dict[str, Tensor], tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A loss of torchtitan's contract: the value, the gradient in the logits, and what it logs."""
    logits = batch["logits"].clone().requires_grad_()
    rest = {name: batch[name] for name in ("generator_logprobs", "advantages", "loss_mask")}
    value, metrics = loss(logits, batch["labels"], tokens, **rest)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient, metrics
