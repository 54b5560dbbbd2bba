"""The outer step is the paper's: SGD with Nesterov momentum of the mean pseudo-gradient."""

import torch

from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    pseudo_gradient,
    take_outer_step,
    trained_weights,
    weights_hash,
)
from parity_tests.recipes.diloco.tiny import Regression


def test_two_steps_are_those_of_the_formula() -> None:
    weights = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    optimizer = OuterOptimizer(lr=0.5, momentum=0.5).of(weights.values())
    for gradient, momentum in (([0.75, -1.0], [0.75, -1.0]), ([1.0, 3.0], [1.375, 2.5])):
        start = weights["w"].clone()
        of_replicas = [torch.tensor(gradient).double() + shift for shift in (1.0, -2.0, 1.0)]
        gradients = [pseudo_gradient(weights, {"w": start - one}) for one in of_replicas]
        take_outer_step(weights, optimizer, gradients)
        step = torch.tensor(gradient).double() + 0.5 * torch.tensor(momentum).double()
        torch.testing.assert_close(weights["w"], start - 0.5 * step)


def test_the_hash_depends_on_names_shapes_dtypes_and_bits() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    others = [
        {"a": torch.zeros(2, 3), "c": torch.ones(4)},
        {"a": torch.zeros(3, 2), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3), "b": torch.ones(4).to(torch.int32)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3), "b": torch.ones(4), "d": torch.tensor(1.0)},
    ]
    assert len({weights_hash(tensors) for tensors in (one, *others)}) == 6
    assert weights_hash(dict(reversed(one.items()))) == weights_hash(one)


def test_only_the_weights_that_are_trained_are_exchanged() -> None:
    model = Regression()
    model.inner[0].requires_grad_(False)
    assert set(trained_weights(model)) == {"inner.2.weight", "inner.2.bias"}
