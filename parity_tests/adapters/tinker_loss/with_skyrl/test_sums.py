"""The gradient of a custom loss on SkyRL's server with FSDP and Megatron, by the installed SkyRL's losses.

Their workers call the loss on each micro-batch, left-padded, with the weights as its mask, and add up the
gradients: what they multiply by (ranks, micro-batches) is what FSDP and Megatron divide by.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import loss_fn
from composer_plugins.adapters.tinker_loss.skyrl_server import forward_backward_on_skyrl
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.skyrl_server import Backend, Server, entry
from parity_tests.rigs.tinker_data import batch, loss_and_gradients


def in_micro_batches(rows: int) -> Backend:
    """The losses of SkyRL's registry on micro-batches of so many sequences."""

    def padded(sequences: list[tuple[Tensor, Any]], part: Callable[[Tensor, Any], Tensor]) -> Tensor:
        found = [part(new, one).flip(0) for new, one in sequences]
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True).flip(1)

    def total(name: str, sequences: list[tuple[Tensor, Any]]) -> Tensor:
        function, losses = upstream.ppo_utils.PolicyLossRegistry.get(name), list[Tensor]()
        for i in range(0, len(sequences), rows):
            part = sequences[i : i + rows]
            new, mask = padded(part, lambda new, _: new), padded(part, lambda _, one: entry(one, "weights"))
            losses.append(function(new, None, None, config=upstream.algorithm({}), loss_mask=mask)[0])
        return torch.stack(losses).sum()

    return total


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_step_has_the_gradient_of_the_loss(backend: str, rows: int, calls: int) -> None:
    data, logprobs = batch(dtype=torch.float32)
    options = {"policy": "grpo", "hint_weight": 0.3}
    _, wanted, metrics = loss_and_gradients(loss_fn(**options), data, logprobs)
    server, function = Server(logprobs, in_micro_batches(rows)), loss_fn(**options, calls_per_step=calls)
    step = function.of_step(function.count(data))
    for i in range(calls):
        found = forward_backward_on_skyrl(server, data[i::calls], step, backend=backend)
    assert found == metrics or calls > 1
    for ours, theirs in zip(server.gradients(), wanted, strict=True):
        assert_parity(ours, theirs, terms=20, dtype=torch.float32, magnitude=1.0)
