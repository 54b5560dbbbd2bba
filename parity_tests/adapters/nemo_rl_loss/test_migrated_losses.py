"""Losses moved to NeMo-RL: a checkout's ClippedPGLossFn has the value and the gradient of the formula."""

from typing import Any

import pytest
import torch
import yaml

from composer_plugins.calling_convention import Counts
from composer_plugins.conformance.nemo_rl_claims import upstream
from composer_plugins.testing.conventions.global_counts import NEMO_RL
from parity_tests.rigs.checkouts import checkout, with_checkout
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs


@with_checkout("nemo-rl")
@pytest.mark.parametrize("name", runs("nemo-rl"))
def test_nemo_rl_trains_what_was_written(name: str) -> None:
    """It adds 1e-8 to every denominator, and multiplies masked tokens by 0, so none is NaN."""
    losses: Any = upstream.load(checkout("nemo-rl")).losses
    for written, objective in moved("nemo-rl", name):
        theirs = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**yaml.safe_load(written.text)["loss_fn"]))
        one = batch()
        logprobs, rows = one.logprobs.clone().requires_grad_(), len(one.mask)
        tensors = {"logprobs": logprobs, "old_logprobs": one.old, "rollout_logprobs": one.rollout}
        tensors |= {"advantages": one.advantages, "mask": one.mask}
        counts = Counts(int(one.mask.sum()), rows, parts=1, ranks=1, width=one.mask.shape[1])
        value = NEMO_RL.call(theirs, tensors, counts, {}).loss
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert_trains(value, gradient, expected(objective, one), torch.float32)
