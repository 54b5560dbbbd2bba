"""The outer step is the paper's, to the last bit torch's SGD with Nesterov momentum."""

import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    Tensors,
    initial_state,
    mean,
    outer_step,
    pseudo_gradient,
    trained_weights,
    weights_hash,
)
from parity_tests.recipes.diloco.tiny import Regression, weights_of


def random_like(weights: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.99)])
def test_the_step_is_that_of_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    model = Regression()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    state = initial_state(trained_weights(model))
    for seed in range(5):
        gradient = random_like(state.weights, seed)
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name].clone()
        sgd.step()
        state = outer_step(state, gradient, OuterOptimizer(lr, momentum))
        assert all(torch.equal(state.weights[name], p) for name, p in model.named_parameters())


def test_the_gradient_is_the_mean_of_start_minus_trained() -> None:
    start = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    locals_ = [{"w": torch.tensor(values, dtype=torch.float64)} for values in ([0.0, 2.0], [0.5, 4.0])]
    gradient = mean([pseudo_gradient(start, local) for local in locals_])
    assert gradient["w"].tolist() == [0.75, -1.0]


def test_the_step_changes_none_of_its_arguments() -> None:
    state = initial_state(weights_of())
    gradient = random_like(state.weights, 0)
    before = [weights_hash(tensors) for tensors in (*state, gradient)]
    outer_step(state, mean([gradient, gradient]), OuterOptimizer())
    assert [weights_hash(tensors) for tensors in (*state, gradient)] == before


def test_the_hash_depends_on_names_shapes_dtypes_and_bits() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    others = [
        {"a": torch.zeros(2, 3), "c": torch.ones(4)},
        {"a": torch.zeros(3, 2), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3), "b": torch.ones(4).to(torch.int32)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(4)},
        {"a": torch.zeros(2, 3), "b": torch.ones(4), "d": torch.tensor(1.0)},
    ]
    hashes = {weights_hash(tensors) for tensors in (one, *others)}
    assert len(hashes) == 6
    assert weights_hash(dict(reversed(one.items()))) == weights_hash(one)


def test_only_the_weights_that_are_trained_are_exchanged() -> None:
    model = Regression()
    model.inner[0].requires_grad_(False)
    assert set(trained_weights(model)) == {"inner.2.weight", "inner.2.bias"}


@pytest.mark.parametrize(
    ("options", "key"), [({"lr": 0.0}, "outer.lr"), ({"momentum": 1.0}, "outer.momentum")]
)
def test_the_outer_optimizers_options_are_checked(options: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        OuterOptimizer(**options)
