"""Losses moved to SkyRL: its registry, with advantages that its own code divides, has value and gradient."""

from typing import Any

import pytest
import torch

from composer_plugins.adapters.skyrl_loss.register import register
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.frameworks.skyrl import ALGORITHM, NODE, Key
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs


@pytest.mark.parametrize("name", runs("skyrl"))
def test_skyrl_trains_what_was_written(name: str) -> None:
    register()
    for written, objective in moved("skyrl", name):
        table = written.table["trainer"]["algorithm"]
        options: dict[str, Any] = {f"{ALGORITHM}.{key}": x for key, x in table.items() if key != "composer"}
        config = upstream.algorithm(options | {NODE: table.get("composer", {})})
        given = batch(nan=True)
        prompts = [2] * (len(given.mask) // 2)
        divided = upstream.divided(
            batch().advantages, given.mask, config.loss_reduction, config.max_seq_len, prompts
        )
        tensors = {"logprobs": given.logprobs, "old_logprobs": given.old, "rollout_logprobs": given.rollout}
        tensors |= {"advantages": torch.where(given.mask, divided, torch.nan), "mask": given.mask}
        value, gradient, _ = upstream.policy_loss(options[Key.POLICY], config, tensors)
        assert_trains(value, gradient, expected(objective, given), torch.float32)
