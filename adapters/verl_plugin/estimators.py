"""Advantage estimators as verl calls them: in the driver, once per step, on the CPU, by keyword."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.options import BATCH_KEYS, AskedOnce, compared_with_none
from composer_plugins.adapters.verl_plugin.upstream import PADDING_UID, beside
from composer_plugins.errors import DataError, Finding, enforce
from composer_plugins.frameworks.verl import Key
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.losses.rollouts import batch_tensors, for_advantage

Estimator = Callable[..., tuple[Tensor, Tensor]]

WARNED = set[str]()  # the advantages of whose groups of one this process has been warned


def estimator(name: str | None) -> Estimator:
    """Return the estimator `composer/<name>`; for None `composer`, which reads `composer.advantage`."""
    options = AskedOnce("advantage", name)

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
        asked = options(config, config)[0]
        choice = asked.choice
        mask = boolean_mask("response_mask", response_mask, check=True)
        on_bad_reward = asked.config.on_bad_reward
        tensors = batch_tensors(token_level_rewards, mask, index, on_bad_reward, padding=PADDING_UID)
        tensors = for_advantage(choice, tensors, mask, "algorithm.composer.on_bad_reward", "verl")
        per_token = "token_rewards" in choice.loss.needs
        keys, of_session, in_groups = BATCH_KEYS.get(), None, "group_ids" in choice.loss.needs
        if in_groups:
            if keys is None:
                refuse_several_outputs(index, config)
            else:
                final, of_session = final_outputs(keys)
                tensors = {k: v[final] if isinstance(v, Tensor) else v for k, v in tensors.items()}
                index = np.asarray(index)[final]
        found = call(choice.with_optional(*choice.loss.optional), tensors, check=True)
        if in_groups and asked.config.policy_weight:
            warn_of_groups_of_one(choice, index)
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


def rows_by_prompt(uids: Iterable[Any]) -> Counter[str]:
    """Return the number of rows of each prompt, without the rows with which verl pads a batch."""
    return Counter(uid for uid in map(str, uids) if not uid.startswith(PADDING_UID))


def warn_of_groups_of_one(choice: Choice, uids: Iterable[Any]) -> None:
    """Warn once in a process where each rollout is the only one with its uid: nothing can be compared."""
    groups = rows_by_prompt(uids)
    if choice.name in WARNED or set(groups.values()) != {1}:
        return
    WARNED.add(choice.name)
    n = len(groups)
    problem = f"the {n} rollouts of this batch are {n} groups of 1, because each has its own uid, and "
    problem += compared_with_none(choice)
    remedy = "set it to 2 or more (GRPO: 8, for example), and write each prompt once in the data: verl gives "
    remedy += "each row of the data a uid, and all rollouts of a prompt must share it"
    enforce([Finding("warning", Key.GROUP_SIZE, problem, remedy)])


def refuse_several_outputs(index: Any, config: Any) -> None:
    """Raise DataError for a prompt with more rows than rollout.n.

    Without composer_sync an estimator does not see which rows are outputs of one session. Where some sessions
    of a prompt failed, several outputs of another are not noticed. Only v1 trainers have several outputs.
    """
    n = beside(config, Key.GROUP_SIZE)
    if n is None or index is None or not beside(config, Key.USE_V1):
        return
    for prompt, rows in rows_by_prompt(index).items():
        if rows <= n:
            continue
        problem = f"prompt {prompt!r} has {rows} rows, and {Key.GROUP_SIZE} is {n}: a session of an agent "
        problem += "has several outputs, which cannot be told apart here"
        remedy = (
            f"set {Key.TRAINER_MODE}=composer_sync, which groups them as verl does, or {Key.ESTIMATOR}=grpo"
        )
        raise DataError("uid", problem, remedy)
