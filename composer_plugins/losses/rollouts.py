"""The rewards of a whole batch, as a framework's trainer has them, as the inputs of an advantage."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError, DataError, Finding, enforce
from composer_plugins.losses.choosing import Choice

DONE = {"zero": "it counts as 0", "drop": "they are left out of their groups"}


def batch_tensors(
    token_rewards: Tensor,
    mask: Tensor,
    index: Any,
    on_bad_reward: str = "error",
    *,
    padding: str = "",
) -> dict[str, Any]:
    """Return a trainer's arguments under the catalogue's names; rows that pad a batch do not count.

    `token_rewards` and `mask` are [rows, tokens], and `index` has the uid of each row's prompt. The uid of a
    row that pads the batch begins with `padding`. With on_bad_reward="drop", rows whose reward is not finite
    do not count either. They are "bad".

    A reward is the sum over all tokens, because the trainer puts it on the last one, masked or not. And
    a row without an unmasked token, wholly rejected for example, has a reward that counts in its group.
    """
    rewards, is_bad = token_rewards.sum(-1), None
    if bad := (~rewards.isfinite()).nonzero().flatten().tolist():
        problem = f"{len(bad)} of {len(rewards)} rollouts have the reward {rewards[bad[0]]:g}, "
        problem += f"the first in row {bad[0]}"
        problem += "" if index is None else f", of the uid {str(index[bad[0]])!r}"
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
        names = list(map(str, index))
        ids = {name: number for number, name in enumerate(dict.fromkeys(names))}
        tensors |= {"group_ids": torch.tensor([ids[name] for name in names]), "num_groups": len(ids)}
        if padding:
            tensors["mask"] = torch.tensor([not name.startswith(padding) for name in names])
    if is_bad is not None and on_bad_reward == "drop":
        tensors["bad"] = is_bad
        tensors["mask"] = tensors.get("mask", torch.ones_like(is_bad)) & ~is_bad.cpu()
    return tensors


def for_advantage(
    choice: Choice, tensors: dict[str, Any], mask: Tensor, key: str, trainer: str
) -> dict[str, Any]:
    """Return the inputs of this advantage among `batch_tensors`: its mask is of rows, or of tokens.

    `trainer` is the framework's name in a warning. Raises ConfigError at `key`, the option on_bad_reward,
    where rows are left out and the advantage cannot.
    """
    per_token, bad = "token_rewards" in choice.loss.needs, tensors.get("bad")
    if bad is not None and not per_token and "mask" not in (*choice.loss.needs, *choice.loss.optional):
        problem = f"it is 'drop', and {choice.name!r} has no input `mask` that leaves a rollout out"
        raise ConfigError(key, problem, "set it to 'zero'")
    found = {name: x for name, x in tensors.items() if name != "bad"}
    if per_token:
        enforce(rewards_left_out(choice, tensors["token_rewards"], mask, trainer))
        found["mask"] = mask if bad is None else mask & ~bad.unsqueeze(-1)
    return found


def rewards_left_out(choice: Choice, token_rewards: Tensor, mask: Tensor, trainer: str) -> Iterator[Finding]:
    """Yield a warning where a row's last reward is at a masked token: a return of tokens leaves it out."""
    last = ((token_rewards != 0) * torch.arange(1, mask.shape[-1] + 1)).argmax(-1, keepdim=True)
    if (token_rewards.gather(-1, last).bool() & ~mask.gather(-1, last)).any():
        problem = f"some are at a masked token, and {choice.name!r} leaves these out, as in {trainer}, which "
        problem += "puts a reward on the last token of the response"
        remedy = "choose an advantage of whole rollouts (grpo, rloo), or end responses in an unmasked token"
        yield Finding("warning", "rewards", problem, remedy)
