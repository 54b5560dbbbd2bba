"""An error for a reward that is not a finite number: TRL takes NaN for None, and averages infinity."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.errors import DataError

LARGEST = torch.finfo(torch.float32).max  # TRL keeps rewards in float32
SHOWN = 60  # characters of a prompt or completion
NOT_APPLICABLE = "return a finite number, or None where the function does not apply"


def checked(function: Any, name: str) -> Any:
    """A reward function with a check of what it returns; a reward model as it is."""
    if isinstance(function, nn.Module):
        return function

    def check(rewards: Any, given: dict[str, Any]) -> Any:
        rewards = list(rewards) if isinstance(rewards, Iterator) else rewards
        _check(name, rewards, given["prompts"], given["completions"], NOT_APPLICABLE)
        return rewards

    if upstream.is_async_callable(function):

        @functools.wraps(function)
        async def call(**given: Any) -> Any:
            return check(await function(**given), given)

    else:

        @functools.wraps(function)
        def call(**given: Any) -> Any:
            return check(function(**given), given)

    return call


def check_models(trainer: GRPOTrainer, rewards: Tensor, prompts: list[Any], completions: list[Any]) -> None:
    """Check the rewards [B, R] of reward models, of this process's rows."""
    mine = rewards[trainer.accelerator.process_index * len(prompts) :][: len(prompts)]
    for function, name, column in zip(trainer.reward_funcs, trainer.reward_func_names, mine.T, strict=True):
        if isinstance(function, nn.Module):
            _check(name, column.tolist(), prompts, completions, "use a model and a dtype with finite logits")


def _check(
    name: str, rewards: Iterable[Any], prompts: Sequence[Any], completions: Sequence[Any], remedy: str
) -> None:
    for i, reward in enumerate(rewards):
        if reward is not None and not abs(reward) <= LARGEST:
            row = f"prompt {_short(prompts[i])}, completion {_short(completions[i])}"
            problem = f"the reward of row {i} of the batch is {float(reward):g} ({row})"
            raise DataError(f"reward {name}", problem, remedy)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
