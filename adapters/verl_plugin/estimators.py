"""Advantage estimators as verl calls them: in the driver, once per step, on the CPU, by keyword."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.rules import node_of, parse_registered
from composer_plugins.errors import DataError

Estimator = Callable[..., tuple[Tensor, Tensor]]


def estimator(name: str | None) -> Estimator:
    """Return the estimator `composer/<name>`; for None `composer`, which reads `composer.advantage`."""

    def advantages(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        reward_baselines: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages [rows, tokens], 0 where the mask is 0, and the same tensor as the returns.

        verl pads a batch with rows without a response, which belong to no group. A reward that is not finite
        is a DataError. A critic cannot learn from these returns.
        """
        choice = parse_registered(node_of(config), "advantage", name)[1]
        mask = response_mask.bool()
        tensors = batch_tensors(token_level_rewards, mask, index, reward_baselines)
        per_token = "token_rewards" in choice.loss.needs
        if per_token:
            tensors["mask"] = mask
        found = choice.with_optional(*choice.loss.optional).call(tensors, check=True)
        found = torch.where(mask, found if per_token else found.unsqueeze(-1), 0.0)
        return found, found

    advantages.__name__ = advantages.__qualname__ = f"composer_{name or 'estimator'}"
    return advantages


def batch_tensors(
    token_rewards: Tensor, mask: Tensor, index: Any, baselines: Tensor | None
) -> dict[str, Any]:
    """Return verl's arguments under the catalogue's names; `mask` is True for rows with a response."""
    token_rewards = torch.where(mask, token_rewards, 0.0)
    rewards = token_rewards.sum(-1)
    if bad := (~rewards.isfinite()).nonzero().flatten().tolist():
        problem = f"{len(bad)} of {len(rewards)} rollouts have the reward {rewards[bad[0]]:g}, "
        problem += f"the first in row {bad[0]}"
        remedy = "return a number from the reward function, or mask the rollout out"
        raise DataError("rewards", problem, remedy)
    tensors: dict[str, Any] = {"rewards": rewards, "token_rewards": token_rewards}
    tensors |= {"lengths": mask.sum(-1), "mask": mask.any(-1)}
    if index is not None:
        uids, group_ids = np.unique(np.asarray(index).astype(str), return_inverse=True)
        tensors |= {"group_ids": torch.as_tensor(group_ids), "num_groups": len(uids)}
    if baselines is not None:
        tensors["baselines"] = baselines
    return tensors
