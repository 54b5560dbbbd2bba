"""How often a loss waits for its device, with health and without: what PRIME-RL and verl call per batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.adapters.verl_plugin.loss import policy_loss
from composer_plugins.losses.flags import Flags
from parity_tests.rigs.prime_rl_doubles import LossInputs
from parity_tests.rigs.worlds import World

# What needs numbers that a GPU has yet to compute.
OPERATORS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
METHODS, CALLS, LOSS = ("tolist", "cpu"), 20, policy_loss("grpo@verl")


class Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in OPERATORS
        return func(*args, **(kwargs or {}))


def prime_rl(health: bool) -> None:
    batch = World().batch(rows=1)
    names = "logprobs", "rollout_logprobs", "advantages", "mask"
    own, theirs, advantages, mask = (batch[name].expand(1, 24)[0] for name in names)
    inputs = LossInputs(own, theirs, None, advantages, mask)
    loss_fn(inputs, policy="dppo_tv@prime-rl", health=health).loss.backward()


def verl(health: bool) -> None:
    pytest.importorskip("omegaconf")
    batch = World().batch()
    config = SimpleNamespace(policy_loss={"composer": {"health": health}}, global_batch_info={})
    given = (batch[name].expand(16, 24) for name in ("old_logprobs", "logprobs", "advantages", "mask"))
    LOSS(*given, config=config)[0].backward()


@pytest.mark.parametrize("call", [prime_rl, verl])
def test_health_waits_no_more_often(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = {}, list[str]()
    for health in (False, True):
        call(health)  # the first call checks values and options
        with monkeypatch.context() as patch, Waits() as waits:
            patch.setattr(Flags, "read", lambda self, flags: [])  # a GPU that is not ready
            for name in METHODS:
                method = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, lambda x, method=method: calls.append("") or method(x))
            for _ in range(CALLS):
                call(health)
        found[health] = waits.count + len(calls)
        calls.clear()
    assert found[True] <= found[False] <= CALLS  # verl's metrics are read once in each call
