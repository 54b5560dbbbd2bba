"""Advantage estimators as verl calls them: in the driver, once per step, on the CPU, by keyword."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.surface import ParsedOnce, compared_with_none, during
from composer_plugins.adapters.verl_plugin.upstream import PADDING_UID, beside
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.findings import Finding, enforce
from composer_plugins.frameworks.verl import Key
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice

Estimator = Callable[..., tuple[Tensor, Tensor]]

DONE = {"zero": "it counts as 0", "drop": "they are left out of their groups"}
WARNED = set[str]()  # the advantages of whose groups of one this process has been warned
_batch_keys: ContextVar[Sequence[str] | None] = ContextVar("batch_keys", default=None)


def sessions_of(keys: Sequence[str]) -> AbstractContextManager[None]:
    """Show our estimators the keys `{uid}_{session}_{output}` of the batch's rows, under composer_sync."""
    return during(_batch_keys, keys)


def estimator(name: str | None) -> Estimator:
    """Return the estimator `composer/<name>`; for None `composer`, which reads `composer.advantage`."""
    options = ParsedOnce("advantage", name)

    def advantages(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages [rows, tokens], 0 where the mask is 0, and the same tensor as the returns.

        A reward that is not finite is a DataError, or what `on_bad_reward` says: "zero" takes 0 for it, and
        "drop" leaves the rollout out of every mean and deviation and gives it advantage 0. Its tokens still
        count in the denominator of the policy loss. A critic cannot learn from these returns. If an agent's
        session has several outputs, a group consists of each session's final output, and the session's other
        outputs get its advantage: 0 if the final output has no unmasked token, as in verl.
        """
        parsed = options(config, config)[0]
        choice = parsed.choice
        mask = response_mask.bool()
        tensors = batch_tensors(token_level_rewards, mask, index, parsed.config.on_bad_reward)
        per_token = "token_rewards" in choice.loss.needs
        bad = tensors.pop("bad", None)
        if bad is not None and not per_token and "mask" not in (*choice.loss.needs, *choice.loss.optional):
            problem = f"it is 'drop', and {choice.name!r} has no input `mask` that leaves a rollout out"
            raise ConfigError("algorithm.composer.on_bad_reward", problem, "set it to 'zero'")
        if per_token:
            enforce(rewards_left_out(choice, tensors["token_rewards"], mask))
            tensors["mask"] = mask if bad is None else mask & ~bad.unsqueeze(-1)
        keys, of_session, in_groups = _batch_keys.get(), None, "group_ids" in choice.loss.needs
        if in_groups:
            if keys is None:
                refuse_several_outputs(index, config)
            else:
                final, of_session = final_outputs(keys)
                tensors = {k: v[final] if isinstance(v, Tensor) else v for k, v in tensors.items()}
                index = np.asarray(index)[final]
        found = call(choice.with_optional(*choice.loss.optional), tensors, check=True)
        if in_groups and parsed.config.policy_weight:
            warn_of_groups_of_one(choice, index, found)
        if of_session is not None:
            empty = (tensors["lengths"] == 0).nonzero().flatten()
            found = found.index_fill(0, empty, 0.0)[of_session]
        found = torch.where(mask, found if per_token else found.unsqueeze(-1), 0.0)
        return found, found

    advantages.__name__ = advantages.__qualname__ = f"composer_{name or 'estimator'}"
    return advantages


def batch_tensors(
    token_rewards: Tensor, mask: Tensor, index: Any, on_bad_reward: str = "error"
) -> dict[str, Any]:
    """Return verl's arguments under the catalogue's names; rows with which verl pads a batch do not count.

    With on_bad_reward="drop", rows whose reward is not finite do not count either. They are "bad".

    As in verl, a reward is the sum over all tokens, because verl puts it on the last one, masked or not. And
    a row without an unmasked token, wholly rejected for example, has a reward that counts in its group.
    """
    rewards, is_bad = token_rewards.sum(-1), None
    if bad := (~rewards.isfinite()).nonzero().flatten().tolist():
        problem = f"{len(bad)} of {len(rewards)} rollouts have the reward {rewards[bad[0]]:g}, "
        problem += f"the first in row {bad[0]}" + (
            "" if index is None else f", of the uid {str(index[bad[0]])!r}"
        )
        remedy = "return a number from the reward function"
        if on_bad_reward == "error":
            raise DataError("rewards", problem, remedy)
        problem += f", and on_bad_reward is {on_bad_reward!r}, so {DONE[on_bad_reward]}"
        enforce([Finding("warning", "rewards", problem, remedy)])
        is_bad = ~rewards.isfinite()
        # A row keeps the finite rewards of its other tokens, a KL penalty for example.
        token_rewards = torch.where(token_rewards.isfinite(), token_rewards, 0.0)
        rewards = torch.where(is_bad, token_rewards.sum(-1), rewards)
    tensors: dict[str, Any] = {"rewards": rewards, "token_rewards": token_rewards, "lengths": mask.sum(-1)}
    if index is not None:
        names = np.asarray(index).astype(str)
        uids, group_ids = np.unique(names, return_inverse=True)
        tensors |= {"group_ids": torch.as_tensor(group_ids), "num_groups": len(uids)}
        tensors["mask"] = torch.as_tensor(~np.char.startswith(names, PADDING_UID))
    if is_bad is not None and on_bad_reward == "drop":
        tensors["bad"] = is_bad
        tensors["mask"] = tensors.get("mask", torch.ones_like(is_bad)) & ~is_bad.cpu()
    return tensors


def rewards_left_out(choice: Choice, token_rewards: Tensor, mask: Tensor) -> Iterator[Finding]:
    """Yield a warning where a row's last reward is at a masked token: a return of tokens leaves it out."""
    last = ((token_rewards != 0) * torch.arange(1, mask.shape[-1] + 1)).argmax(-1, keepdim=True)
    if (token_rewards.gather(-1, last).bool() & ~mask.gather(-1, last)).any():
        problem = f"some are at a masked token, and {choice.name!r} leaves these out, as in verl, which puts "
        problem += "a reward on the last token of the response"
        remedy = "choose an advantage of whole rollouts (grpo, rloo), or end responses in an unmasked token"
        yield Finding("warning", "rewards", problem, remedy)


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


def warn_of_groups_of_one(choice: Choice, uids: Iterable[Any], advantages: Tensor) -> None:
    """Warn once in a process where each rollout is the only one with its uid: nothing can be compared."""
    groups = rows_by_prompt(uids)
    if choice.name in WARNED or set(groups.values()) != {1}:
        return
    WARNED.add(choice.name)
    n = len(groups)
    problem = f"the {n} rollouts of this batch are {n} groups of 1, because each has its own uid, and "
    problem += compared_with_none(choice, is_zero=not advantages.any())
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
