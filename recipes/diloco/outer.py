"""DiLoCo's outer step (Douillard et al. 2023, arXiv 2311.08105), and what replicas exchange.

Every replica starts a round from the same weights theta and trains for H optimizer steps of its own. Then

    g_i   = theta - theta_i                    the pseudo-gradient of replica i
    g     = (g_1 + ... + g_n) / n              always summed in the order of the replicas
    theta = SGD with Nesterov momentum of g
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD with Nesterov momentum. The defaults are the paper's."""

    lr: float = 0.7
    momentum: float = 0.9

    def of(self, weights: Iterable[Tensor]) -> torch.optim.SGD:
        """Return the optimizer of these weights."""
        return torch.optim.SGD(weights, lr=self.lr, momentum=self.momentum, nesterov=True)


def pseudo_gradient(start: Tensors, trained: Tensors) -> Tensors:
    """Return the difference between the weights at the start of the round and the trained ones."""
    return {name: start[name] - trained[name] for name in start}


def take_outer_step(weights: Tensors, optimizer: torch.optim.SGD, gradients: Sequence[Tensors]) -> None:
    """Change the weights by a step with the mean of the pseudo-gradients, summed in the given order."""
    for name, weight in weights.items():
        total = gradients[0][name].clone()
        for gradient in gradients[1:]:
            total += gradient[name]
        weight.grad = total / len(gradients)
    optimizer.step()


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
