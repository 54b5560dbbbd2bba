"""Equal rewards have an advantage of exactly 0, whatever they are."""

import pytest
import torch
from torch import Tensor

from composer_plugins.losses.row import Loss
from composer_plugins.testing.inputs import Batch, draw, float_tensors
from composer_plugins.testing.settings import Setting, settings
from parity_tests.rigs.every import each


@each("advantage")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.0, -1 / 3, 1e-30, 1e6 + 0.1, 1e30])
def test_equal_rewards_have_no_advantage_at_all(row: Loss, dtype: torch.dtype, reward: float) -> None:
    for setting in settings(row):
        if setting.params.get("singleton") == "raw":
            continue  # a group of one gets its reward
        for size in (1, 3, 8, 30):
            ours = setting.result(equal_rewards(setting, size, reward, dtype))
            assert not ours.any(), f"{setting.label}, {size} rows: {ours.flatten().tolist()}"


def equal_rewards(setting: Setting, size: int, reward: float, dtype: torch.dtype) -> Batch:
    """A batch in which every row earns the same, and what its critic or its baseline expects."""
    batch = draw(setting, size=size, unmasked=0.7 if size > 3 else 1.0, dtype=dtype)
    equal = {n: torch.full_like(x, reward) for n, x in float_tensors(batch).items() if "reward" in n}
    if "baselines" in batch:  # a baseline of its own: what the row earns
        equal = {n: torch.zeros_like(x) for n, x in equal.items()}
        equal["token_rewards"][:, 0] = equal["baselines"] = torch.full((size,), reward, dtype=dtype)
        batch["mask"] = torch.arange(batch["mask"].shape[1]).expand(batch["mask"].shape) == 0
    if "values" in batch:
        equal = equal_critic(batch)
    if setting.loss.name == "reinforce_pp":
        equal["token_rewards"] = torch.zeros_like(batch["token_rewards"])
        equal["token_rewards"][:, -1] = reward
        batch["mask"] = torch.ones_like(batch["mask"])
    return batch | equal


def equal_critic(batch: Batch) -> dict[str, Tensor]:
    """A critic that is right: nothing is earned beyond what it expects."""
    rewards = torch.zeros_like(batch["token_rewards"])
    return {"token_rewards": rewards, "values": torch.zeros_like(rewards)}
