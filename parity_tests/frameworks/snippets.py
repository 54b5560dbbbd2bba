"""Snippets of the pages on frameworks without an adapter: a small batch, and stand-ins for their modules."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

MASK = torch.arange(4) < torch.tensor([[4], [2], [3]])
LOGPROBS = torch.full((3, 4), -1.0)
OLD = LOGPROBS - 0.1
ADVANTAGES = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A module of this name, and its parents, in sys.modules."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        parent = ".".join(parts[:length])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    vars(sys.modules[name]).update(names)


def check_trains(loss: Tensor, inputs: Tensor, mask: Tensor = MASK) -> None:
    """The loss is a finite number whose gradient is 0 at masked tokens and nowhere else."""
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert loss.dim() == 0 and loss.isfinite()
    assert torch.equal(gradient != 0, mask.expand_as(gradient))
