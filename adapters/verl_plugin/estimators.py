"""Advantage estimators as verl calls them: in the driver, once per step, on the CPU, by keyword."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_parts.rules import chosen
from composer_plugins.adapters.verl_plugin.config import node_of
from composer_plugins.catalogue import Choice
from composer_plugins.errors import DataError

Estimator = Callable[..., tuple[Tensor, Tensor]]


def estimator(name: str | None) -> Estimator:
    """The estimator `composer/<name>`, or with None `composer`: what `algorithm.composer.advantage` names."""

    def advantages(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        reward_baselines: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Advantages [rows, tokens], 0 where the response is over, and the same as returns.

        A row without a response counts nowhere: verl pads a batch with such rows. A NaN reward is a
        DataError. A critic is not served: its returns would be the advantages.
        """
        choice = chosen(node_of(config), "advantage", name)[1]
        given = tensors(token_level_rewards, response_mask, index, reward_baselines)
        return _call(choice, given, response_mask.bool())

    advantages.__name__ = advantages.__qualname__ = f"composer_{name or 'estimator'}"
    return advantages


def tensors(
    token_rewards: Tensor, response_mask: Tensor, index: Any, baselines: Tensor | None
) -> dict[str, Any]:
    """verl's arguments by their names in the catalogue."""
    mask = response_mask.bool()
    live = mask.any(-1)
    token_rewards = torch.where(mask, token_rewards, 0.0)
    rewards = token_rewards.sum(-1)
    if bad := [i for i, broken in enumerate(rewards.isnan().tolist()) if broken]:
        raise DataError(
            f"the rewards of {len(bad)} of {len(rewards)} rollouts are NaN, row {bad[0]} first: a reward "
            "function returned it; return a number, or mask the rollout out"
        )
    given: dict[str, Any] = {
        "rewards": rewards,
        "token_rewards": token_rewards,
        "lengths": mask.sum(-1),
        "mask": live,
    }
    if index is not None:
        uids, numbered = np.unique(np.asarray(index).astype(str), return_inverse=True)
        given |= {"group_ids": torch.as_tensor(numbered), "num_groups": len(uids)}
    if baselines is not None:
        given["baselines"] = baselines
    return given


def _call(choice: Choice, given: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
    per_token = "token_rewards" in choice.loss.needs
    given = given | {"mask": mask} if per_token else given  # of tokens, where the estimator is
    if absent := [need for need in choice.loss.needs if need not in given]:
        raise DataError(f"advantage {choice.loss.name!r} needs {', '.join(absent)}; this batch has none")
    optional = {name: given[name] for name in choice.loss.optional if name in given}
    found = choice.loss.kernel()(*(given[need] for need in choice.loss.needs), **optional, **choice.params)
    advantages = torch.where(mask, found if per_token else found.unsqueeze(-1), 0.0)
    return advantages, advantages
