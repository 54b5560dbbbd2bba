"""Tinker's SDK itself: its step from a loss to the weights that it sends, and its tracing of a loss."""

from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker.lib.public_interfaces.custom_loss import (
    check_loss_inputs,
    encode_graph,
    run_loss_handle,
    trace_loss,
)
from tinker.lib.public_interfaces.training_client import TrainingClient
from torch import Tensor

from composer_plugins.adapters.tinker_loss import custom_loss, inputs_apart, loss_fn
from composer_plugins.errors import ComposerError, ConfigError
from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.tinker_data import POLICIES, batch, loss_and_gradients, options_of


def theirs() -> tuple[list[types.Datum], list[Tensor]]:
    """Data of the SDK's own types, which are float32."""
    return batch(types.Datum, types.ModelInput, dtype=torch.float32)


class Client(TrainingClient):
    """The SDK's client with a server that answers each request at once, two data in a request."""

    def __init__(self, logprobs: Sequence[Tensor]) -> None:
        config = SimpleNamespace(fwdbwd_max_chunk_len=2, fwdbwd_max_chunk_bytes_count=10**6)
        holder: Any = SimpleNamespace(
            _client_config=config, get_telemetry=lambda: None, run_coroutine_threadsafe=self.not_run
        )
        super().__init__(holder, 0, "model", info=None)  # type: ignore[arg-type]
        self.logprobs = {len(one): one for one in logprobs}

    def not_run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the SDK would send, which is the step of the optimizer."""
        coroutine.close()
        return answered(None)

    def _run_fwd_bwd(self, requests: Any, *_: Any, **__: Any) -> Any:
        lengths = [len(one.loss_fn_inputs["target_tokens"].data) for chunk in requests for one in chunk.data]
        return answered(output_of([self.logprobs[length] for length in lengths]))


def output_of(logprobs: Sequence[Tensor]) -> types.ForwardBackwardOutput:
    """What the server answers with these log-probabilities."""
    outputs = [{"logprobs": types.TensorData.from_torch(one)} for one in logprobs]
    kind, metrics = "logprobs", {"loss:sum": 0.0}
    return types.ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=outputs, metrics=metrics)


def answered(answer: Any) -> AwaitableConcurrentFuture[Any]:
    """A future of the SDK with its answer."""
    future: Future[Any] = Future()
    future.set_result(answer)
    return AwaitableConcurrentFuture(future)


def test_a_second_call_before_the_optimizers_step_is_an_error() -> None:
    data, logprobs = theirs()
    client, loss = Client(logprobs), loss_fn(policy="grpo")
    first, second = (client.forward_backward_custom(part, loss) for part in (data[:3], data[3:]))
    assert "composer/loss" in first.result().metrics
    with pytest.raises(ConfigError, match="calls_per_step: it is 1, and this is a second call before optim"):
        second.result()


def test_one_call_before_each_step_of_the_optimizer_is_right() -> None:
    data, logprobs = theirs()
    client, loss = Client(logprobs), loss_fn(policy="grpo")
    for _ in range(3):
        future = client.forward_backward_custom(data, loss)
        client.optim_step(types.AdamParams(learning_rate=1e-5))
        assert "composer/loss" in future.result().metrics
    bare, apart = inputs_apart(data, loss)
    assert Client(logprobs).forward_backward_custom(bare, apart).result()
    client.forward_backward_custom(bare, apart).result()
    with pytest.raises(ConfigError, match="a second call"):
        client.forward_backward_custom(bare, apart).result()


@pytest.mark.parametrize("options", [{"denominator": "token-sum"}, {"calls_per_step": 2}], ids=str)
def test_a_sum_and_a_loss_of_the_step_take_two_calls(options: dict[str, Any]) -> None:
    data, logprobs = theirs()
    client, loss = Client(logprobs), loss_fn(policy="grpo", **options)
    function = loss if "denominator" in options else loss.of_step(loss.count(data))
    for part in (data[:2], data[2:]):
        assert client.forward_backward_custom(part, function).result()


@pytest.mark.parametrize("loss", POLICIES, ids=lambda one: one.name)
def test_the_sdk_sends_the_gradient(loss: Loss) -> None:
    """The weights that it sends, once the server has answered, are the negative gradient, exactly."""
    data, logprobs = theirs()
    function = loss_fn(**options_of(loss), hint_weight=0.3)
    value, gradients, metrics = loss_and_gradients(function, data, logprobs)
    result = TrainingClient._compute_custom_loss(data, function, output_of(logprobs))
    for datum, gradient in zip(result.data, gradients, strict=True):
        assert torch.equal(datum.loss_fn_inputs["weights"].to_torch(), -gradient)
    assert result.loss_sum == float(value) and result.metrics == metrics
    assert all(type(x) is float for x in metrics.values())


CURRENT = {"policy": "ppo", "old_policy": "current"}


@pytest.mark.parametrize("options", [*map(options_of, POLICIES), CURRENT], ids=str)
def test_tinker_traces_every_policy_loss(options: dict[str, Any]) -> None:
    """The graph has torch's functions alone, it is encoded, and it gives our value and gradient."""
    data, logprobs = theirs()
    value, gradients, _ = loss_and_gradients(loss_fn(**options), data, logprobs)
    custom = custom_loss(**options)
    assert options is not CURRENT or "old_logprobs" not in custom.input_ranks
    handle = trace_loss(custom.function, custom.input_ranks, "session")
    assert encode_graph(handle).nodes
    filled = custom.data(data)
    check_loss_inputs(handle, filled)
    leaves = [one.clone().requires_grad_() for one in logprobs]
    total, metrics = run_loss_handle(handle, filled, leaves)
    assert_parity(total, value, terms=60, dtype=torch.float32, magnitude=max(1.0, abs(float(value))))
    for ours, wanted in zip(torch.autograd.grad(total, leaves), gradients, strict=True):
        assert_parity(ours, wanted, terms=12, dtype=torch.float32, magnitude=1.0, what="gradient")
    assert metrics["custom/policy/tokens:sum"] == 12.0


def test_a_traced_loss_of_a_step_in_several_calls() -> None:
    """The denominator is an entry of the data, so that the parts of a step add up."""
    data, logprobs = theirs()
    custom = custom_loss(policy="cispo")
    handle = trace_loss(custom.function, custom.input_ranks, "session")
    filled = custom.data(data)
    whole, _ = run_loss_handle(handle, filled, logprobs)
    parts = [run_loss_handle(handle, filled[i : i + 2], logprobs[i : i + 2])[0] for i in (0, 2)]
    assert_parity(sum(parts), whole, terms=20, dtype=torch.float32, magnitude=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"hint_weight": 0.1}, {"replay_weight": 0.1}, {"rollout_correction": "tis"}], ids=str
)
def test_a_traced_loss_has_the_policy_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ComposerError, match="the traced function has the policy loss alone"):
        custom_loss(policy="reinforce", **options)
