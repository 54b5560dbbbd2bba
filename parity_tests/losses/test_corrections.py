"""NaN in a rollout correction is NaN in the gradient of the loss that it weighs."""

import pytest
import torch

from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.policy import grpo, gspo
from composer_plugins.losses.row import Loss
from composer_plugins.testing.inputs import draw, float_tensors, one_of_each_row, poisoned_at
from composer_plugins.testing.settings import settings
from parity_tests.rigs.every import each


@each("correction")
@pytest.mark.parametrize("loss", [grpo, gspo], ids=["grpo", "gspo"])
def test_nan_in_a_correction_is_nan_in_the_gradient_of_the_loss_that_it_weighs(row: Loss, loss: Loss) -> None:
    for setting in settings(row):
        batch = draw(setting, spread=0.01)
        mask, old = batch["mask"], batch["old_logprobs"]
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64).unsqueeze(1)
        where = one_of_each_row(mask)
        for name in float_tensors(batch):
            weights = setting.result(batch | {name: poisoned_at(batch[name], where)})
            logprobs = old.clone().requires_grad_()  # no token is clipped
            corrected(loss(logprobs, old, advantages, mask), weights, mask).loss.sum().backward()
            assert all(logprobs.grad[token].isnan() for token in where), f"NaN in {name}: {logprobs.grad}"
