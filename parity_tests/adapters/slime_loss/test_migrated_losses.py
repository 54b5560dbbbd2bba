"""Losses moved to slime: a checkout's dispatcher of losses has the value and the gradient of the formula."""

import pytest
import torch
import yaml

from composer_plugins.conformance.slime_claims import upstream
from composer_plugins.conformance.slime_claims.claims import arguments
from composer_plugins.testing.conventions.global_counts import logits_of
from parity_tests.rigs.checkouts import checkout, with_checkout
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs


@with_checkout("slime")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", runs("slime"))
def test_slime_trains_what_was_written(name: str) -> None:
    """In float32, which slime asserts. It multiplies masked tokens by 0, so none is NaN."""
    slime = upstream.load(checkout("slime"))
    for written, objective in moved("slime", name):
        one = batch()
        rows, width = one.mask.shape
        logprobs = one.logprobs.clone().requires_grad_()
        masks = [row.float() for row in one.mask]
        inputs = {
            "unconcat_tokens": [torch.zeros(width + 1, dtype=torch.long)] * rows,
            "total_lengths": [width + 1] * rows,
            "response_lengths": [width] * rows,
            "loss_masks": masks,
            "rollout_mask_sums": torch.stack([x.sum() for x in masks]),
            "advantages": [*one.advantages.float()],
            "log_probs": [*one.old.float()],
            "rollout_log_probs": [*one.rollout.float()],
        }
        args = arguments(**yaml.safe_load(written.text))
        loss, count = slime.loss_of(args, inputs, logits_of(logprobs).float(), 1, rows)
        value = loss / count
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert_trains(value, gradient, expected(objective, one), torch.float32)
