"""The gradient of a custom loss on SkyRL's server, by a model of its two divisors in float32."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import loss_fn
from composer_plugins.adapters.tinker_loss.skyrl_server import forward_backward_on_skyrl
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.tinker_data import batch, loss_and_gradients


def numbers(datum: Any, name: str) -> Tensor:
    found: Tensor = datum.loss_fn_inputs[name].to_torch()
    return found


class Server:
    """SkyRL 0.3.0's `loss_for_lora` and `AccumulatedGradients`, with the log-probabilities as parameters."""

    def __init__(self, logprobs: Sequence[Tensor]) -> None:
        self.logprobs = [one.clone().requires_grad_() for one in logprobs]
        self.sums = [torch.zeros_like(one) for one in logprobs]
        self.count = 0

    def forward(self, data: Sequence[Any], loss_fn: str) -> Any:
        """The log-probabilities of these data."""
        outputs = [{"logprobs": SimpleNamespace(data=self.of(one).tolist())} for one in data]
        return SimpleNamespace(result=lambda: SimpleNamespace(loss_fn_outputs=outputs))

    def of(self, datum: Any) -> Tensor:
        """The parameters that are the log-probabilities of this datum, by its tokens."""
        (found,) = [x for x in self.logprobs if len(x) == len(datum.model_input.tokens)]
        return found

    def forward_backward(self, data: Sequence[Any], loss_fn: str) -> Any:
        """Add the gradient of the sum over sequences of their mean by weight."""
        for one in data:
            new, weights = self.of(one), numbers(one, "weights")
            if loss_fn == "cross_entropy":
                token = -new * weights
            else:
                token = -(new - numbers(one, "logprobs")).exp() * numbers(one, "advantages") * weights
            loss = token.sum() / weights.sum().clamp(min=1e-9)
            (slope,) = torch.autograd.grad(loss, [new])
            at = next(i for i, x in enumerate(self.logprobs) if x is new)
            self.sums[at] += slope
            self.count += 1
        return SimpleNamespace(result=lambda: None)

    @property
    def gradients(self) -> list[Tensor]:
        """What the optimizer gets."""
        return [one / self.count for one in self.sums]


@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_has_the_gradient_of_the_loss(parts: int) -> None:
    data, logprobs = batch(dtype=torch.float32)
    function = loss_fn(policy="grpo", hint_weight=0.3, calls_per_step=parts)
    whole = loss_fn(policy="grpo", hint_weight=0.3)
    value, wanted, metrics = loss_and_gradients(whole, data, logprobs)
    server = Server(logprobs)
    if parts == 1:
        assert forward_backward_on_skyrl(server, data, function) == metrics
    else:
        step = function.of_step(function.count(data))
        for part in (data[:2], data[2:]):
            forward_backward_on_skyrl(server, part, step, data_of_step=len(data))
    for ours, theirs in zip(server.gradients, wanted, strict=True):
        assert_parity(ours, theirs, terms=20, dtype=torch.float32, magnitude=1.0)


def test_its_own_custom_call_has_another_gradient() -> None:
    """What docs/tinker.md has measured: the weights of each sequence are divided by their sum."""
    data, logprobs = batch(dtype=torch.float32)
    _, wanted, _ = loss_and_gradients(loss_fn(policy="grpo"), data, logprobs)
    server = Server(logprobs)
    sent = []
    for one, slope in zip(data, wanted, strict=True):
        inputs = {"target_tokens": numbers(one, "target_tokens"), "weights": -slope}
        sent.append(type(one)(model_input=one.model_input, loss_fn_inputs=inputs))
    server.forward_backward(sent, "cross_entropy")
    scales = [float((a / b)[b != 0][0]) for a, b in zip(server.gradients, wanted, strict=True)]
    assert max(scales) / min(scales) > 1e6  # a sequence with negative weights against one with positive
