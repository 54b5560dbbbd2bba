"""DiLoCo's outer step (Douillard et al. 2023, arXiv 2311.08105), on tensors by name.

Every replica starts a round from the same weights theta and trains for H optimizer steps of its own. Then

    g_i   = theta - theta_i                    the pseudo-gradient of replica i
    g     = (g_1 + ... + g_n) / n              always summed in the order of the replicas
    m     = momentum * m + g
    theta = theta - lr * (g + momentum * m)    SGD with Nesterov momentum

The operations and their order are those of ``torch.optim.SGD(nesterov=True)``, so the numbers are too.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_plugins.errors import ConfigError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD with Nesterov momentum. The defaults are the paper's."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError("outer.lr", f"it is {self.lr}", "set a number above 0")
        if not 0 < self.momentum < 1:
            raise ConfigError("outer.momentum", f"it is {self.momentum}", "set a number between 0 and 1")


class OuterState(NamedTuple):
    """The weights with which a round starts, and the momentum."""

    weights: Tensors
    momentum: Tensors


def initial_state(weights: Tensors) -> OuterState:
    """Return the state before the first round."""
    return OuterState(weights, {name: torch.zeros_like(weight) for name, weight in weights.items()})


def pseudo_gradient(start: Tensors, local: Tensors) -> Tensors:
    """Return the difference between the weights at the start of the round and the trained ones."""
    return {name: start[name] - local[name] for name in start}


def mean(pseudo_gradients: Sequence[Tensors]) -> Tensors:
    """Return the mean over the replicas, summed in the given order."""
    first, *others = pseudo_gradients
    total = dict(first)
    for one in others:
        total = {name: total[name] + one[name] for name in total}
    return {name: value / len(pseudo_gradients) for name, value in total.items()}


def outer_step(state: OuterState, gradient: Tensors, optimizer: OuterOptimizer) -> OuterState:
    """Return the state after the step. No tensor of the given state is changed."""
    momentum = {name: state.momentum[name] * optimizer.momentum + g for name, g in gradient.items()}
    step = {name: g.add(momentum[name], alpha=optimizer.momentum) for name, g in gradient.items()}
    weights = {name: state.weights[name].add(step[name], alpha=-optimizer.lr) for name in step}
    return OuterState(weights, momentum)


def trained_weights(model: nn.Module) -> Tensors:
    """Return copies in main memory of the weights that are trained: what replicas exchange."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Tensors) -> None:
    """Copy the weights into the model."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(weights[name])


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of the names, shapes, dtypes and bytes of the tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def frozen_hash(model: nn.Module) -> str:
    """Return a SHA-256 of the weights that are not trained: below an adapter, the base model."""
    return weights_hash({name: p for name, p in model.named_parameters() if not p.requires_grad})
