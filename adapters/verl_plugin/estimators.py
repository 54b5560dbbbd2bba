"""Advantage estimators as verl calls them: in the driver, once per step, on the CPU, by keyword."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.options import BATCH_KEYS, AskedOnce
from composer_plugins.adapters.verl_plugin.upstream import PADDING_UID, beside
from composer_plugins.frameworks.verl import Key
from composer_plugins.health.watch import Health, rollouts
from composer_plugins.losses.calling import call
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.losses.rollouts import batch_tensors, for_advantage

Estimator = Callable[..., tuple[Tensor, Tensor]]


def estimator(name: str | None) -> Estimator:
    """Return the estimator `composer/<name>`; for None `composer`, which reads `composer.advantage`."""
    options, health = AskedOnce("advantage", name), Health(on=False)

    def advantages(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return advantages [rows, tokens], 0 where the mask is 0, and the same tensor as the returns.

        A reward that is not finite is a DataError, or what `on_bad_reward` says: "zero" takes 0 for it, and
        "drop" leaves the rollout out of every mean and deviation and gives it advantage 0. Its tokens still
        count in the denominator of the policy loss. A critic cannot learn from these returns. If an agent's
        session has several outputs, a group consists of each session's final output, and the session's other
        outputs get its advantage: 0 if the final output has no unmasked token, as in verl.
        """
        nonlocal health
        asked, is_new = options(config, config)
        health = Health(on=asked.config.health) if is_new else health
        choice = asked.choice
        mask = boolean_mask("response_mask", response_mask, check=True)
        on_bad_reward = asked.config.on_bad_reward
        tensors = batch_tensors(token_level_rewards, mask, index, on_bad_reward, padding=PADDING_UID)
        tensors = for_advantage(choice, tensors, mask, "algorithm.composer.on_bad_reward", "verl")
        per_token = "token_rewards" in choice.loss.needs
        keys, of_session, in_groups = BATCH_KEYS.get(), None, "group_ids" in choice.loss.needs
        if in_groups and keys is not None:
            final, of_session = final_outputs(keys)
            tensors = {k: v[final] if isinstance(v, Tensor) else v for k, v in tensors.items()}
            index = np.asarray(index)[final.numpy()]
        found = call(choice.with_optional(*choice.loss.optional), tensors, check=True)
        if in_groups and asked.config.policy_weight:
            ids = [str(one) for one in index]
            counted = [row for row, uid in enumerate(ids) if not uid.startswith(PADDING_UID)]
            shown = rollouts(tensors["rewards"][counted], [ids[row] for row in counted])
            health.step("rollouts", shown | {"rollouts of a prompt": beside(config, Key.GROUP_SIZE) or 0})
        if of_session is not None:
            empty = (tensors["lengths"] == 0).nonzero().flatten()
            found = found.index_fill(0, empty, 0.0)[of_session]
        found = torch.where(mask, found if per_token else found.unsqueeze(-1), 0.0)
        return found, found

    advantages.__name__ = advantages.__qualname__ = f"composer_{name or 'estimator'}"
    return advantages


def final_outputs(keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the row of each session's final output, and for each row the position of its session's."""
    final: dict[str, tuple[int, int]] = {}
    sessions = []
    for row, key in enumerate(keys):
        session, _, output = key.rpartition("_")
        sessions.append(session)
        final[session] = max(final.get(session, (-1, row)), (int(output), row))
    position = {session: i for i, session in enumerate(final)}
    rows = torch.tensor([row for _, row in final.values()])
    return rows, torch.tensor([position[session] for session in sessions])
