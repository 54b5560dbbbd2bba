"""The gradient of a custom loss on SkyRL's server with JAX, by a model of its two divisors in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import loss_fn
from composer_plugins.adapters.tinker_loss.skyrl_server import forward_backward_on_skyrl
from composer_plugins.errors import ConfigError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.skyrl_server import Server, entry
from parity_tests.rigs.tinker_data import batch, loss_and_gradients


def jax(name: str, sequences: list[tuple[Tensor, Any]]) -> Tensor:
    """SkyRL 0.3.0's `loss_for_lora`: the sum over sequences of their mean by weight."""
    total = torch.zeros(())
    for new, one in sequences:
        weights = entry(one, "weights")
        if name == "cross_entropy":
            token = -new * weights
        else:
            token = -(new - entry(one, "logprobs")).exp() * entry(one, "advantages") * weights
        total = total + token.sum() / weights.sum().clamp(min=1e-9)
    return total


@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_has_the_gradient_of_the_loss(parts: int) -> None:
    data, logprobs = batch(dtype=torch.float32)
    function = loss_fn(policy="grpo", hint_weight=0.3, calls_per_step=parts)
    whole = loss_fn(policy="grpo", hint_weight=0.3)
    value, wanted, metrics = loss_and_gradients(whole, data, logprobs)
    server = Server(logprobs, jax)
    if parts == 1:
        assert forward_backward_on_skyrl(server, data, function, backend="jax") == metrics
    else:
        step = function.of_step(function.count(data))
        for part in (data[:2], data[2:]):
            forward_backward_on_skyrl(server, part, step, backend="jax", data_of_step=len(data))
    for ours, theirs in zip(server.gradients(server.sequences), wanted, strict=True):
        assert_parity(ours, theirs, terms=20, dtype=torch.float32, magnitude=1.0)


def test_an_unknown_backend_is_an_error() -> None:
    data, logprobs = batch(dtype=torch.float32)
    with pytest.raises(ConfigError, match="^backend: unknown backend 'fsdp2'; known: fsdp, jax, megatron$"):
        forward_backward_on_skyrl(Server(logprobs, jax), data, loss_fn(policy="grpo"), backend="fsdp2")
