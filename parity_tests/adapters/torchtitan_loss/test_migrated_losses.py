"""Losses moved to torchtitan: the class that is written has the value and the gradient of the formula."""

from typing import Any

import pytest
import torch

from composer_plugins.adapters.torchtitan_loss.migration import RL
from composer_plugins.calling_convention import Counts
from composer_plugins.testing.conventions.logits import TORCHTITAN
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", runs("torchtitan"))
def test_torchtitan_trains_what_was_written(loss_module: Any, name: str) -> None:
    """In float32, by the lines of Python; in the session `torchtitan` with torchtitan itself."""
    for written, objective in moved("torchtitan", name):
        of_loss = written.text.partition(f"from {RL}.rollout")[0]  # the advantage's module imports vLLM
        exec(of_loss, names := dict[str, Any]())
        one = batch(nan=True)
        logprobs = one.logprobs.clone().requires_grad_()
        tensors = {"logprobs": logprobs, "rollout_logprobs": one.rollout}
        tensors |= {"advantages": one.advantages, "mask": one.mask}
        counts = Counts(int(one.mask.sum()), len(one.mask), parts=1, ranks=1, width=one.mask.shape[1])
        value = TORCHTITAN.call(names["loss"].build(), tensors, counts, {}).loss
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert_trains(value, gradient, expected(objective, one), torch.float32)
