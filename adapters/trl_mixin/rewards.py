"""Rewards that are not finite numbers: TRL takes NaN for None, and averages infinity.

`on_bad_reward` says what becomes of them: "error" raises, "zero" takes 0, and "drop" leaves the completion
out of the mean and the deviation of its group, with advantage 0.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.metrics import warn_once
from composer_plugins.errors import DataError

LARGEST = torch.finfo(torch.float32).max  # TRL keeps rewards in float32
SHOWN = 60  # characters of a prompt or completion
BAD = math.inf  # what stands for such a reward between a function and `treated`: NaN is None there
NOT_APPLICABLE = "return a finite number, or None where the function does not apply"
OF_A_MODEL = "use a model and a dtype with finite logits"
DONE = {"zero": "0 is taken in its place", "drop": "the completion is left out of its group"}


def checked(function: Any, name: str, on_bad_reward: str = "error") -> Any:
    """A reward function with a check of what it returns; a reward model as it is.

    Unless `on_bad_reward` is "error" it returns BAD for a reward that is not finite, for `treated`.
    """
    if isinstance(function, nn.Module):
        return function
    warned = set[str]()

    def check(rewards: Any, given: dict[str, Any]) -> Any:
        rewards = list(rewards) if isinstance(rewards, Iterator) else rewards
        error = next(_errors(name, rewards, given["prompts"], given["completions"], NOT_APPLICABLE), None)
        if error is None:
            return rewards
        _raise_or_warn(error, on_bad_reward, warned)
        return [BAD if _is_bad(reward) else reward for reward in rewards]

    if upstream.is_async_callable(function):

        @functools.wraps(function)
        async def call(**given: Any) -> Any:
            return check(await function(**given), given)

    else:

        @functools.wraps(function)
        def call(**given: Any) -> Any:
            return check(function(**given), given)

    return call


def treated(
    trainer: GRPOTrainer, rewards: Tensor, prompts: list[Any], completions: list[Any], on_bad_reward: str
) -> Tensor:
    """The rewards [B, R] of all processes' rows, after `on_bad_reward` has been applied to NaN and infinity.

    "drop" makes all rewards of a row NaN, as if no reward function applied to it: TRL leaves it
    out of the statistics of its group and gives it advantage 0, so it adds nothing to the policy loss. Its
    tokens count in the denominator, and the KL and the hint channel, which read no reward, act on them.
    """
    is_model = [isinstance(function, nn.Module) for function in trainer.reward_funcs]
    bad = rewards.isinf() | (rewards.isnan() & torch.tensor(is_model, device=rewards.device))
    mine = rewards[trainer.accelerator.process_index * len(prompts) :][: len(prompts)]
    for name, column, of_a_model in zip(trainer.reward_func_names, mine.T, is_model, strict=True):
        found = _errors(name, column.tolist(), prompts, completions, OF_A_MODEL) if of_a_model else ()
        for error in found:
            _raise_or_warn(error, on_bad_reward, trainer.composer_warned)
    if on_bad_reward == "error":
        return rewards
    upstream.add_to_mean(trainer, "composer/bad_reward_frac", float(bad.any(1).sum()), len(bad))
    if on_bad_reward == "zero":
        return rewards.masked_fill(bad, 0.0)
    return rewards.masked_fill(bad.any(1, keepdim=True), torch.nan)


def _is_bad(reward: Any) -> bool:
    return reward is not None and not abs(reward) <= LARGEST


def _errors(
    name: str, rewards: Iterable[Any], prompts: Sequence[Any], completions: Sequence[Any], remedy: str
) -> Iterator[DataError]:
    """Yield the error of each reward that is not finite."""
    for i, reward in enumerate(rewards):
        if _is_bad(reward):
            row = f"prompt {_short(prompts[i])}, completion {_short(completions[i])}"
            problem = f"the reward of row {i} of the batch is {float(reward):g} ({row})"
            yield DataError(f"reward {name}", problem, remedy)


def _raise_or_warn(error: DataError, on_bad_reward: str, warned: set[str]) -> None:
    """Raise the error, or warn of the first one of a reward function."""
    if on_bad_reward == "error":
        raise error
    done = f"on_bad_reward is {on_bad_reward!r}, so {DONE[on_bad_reward]}"
    warn_once(warned, f"{error.key}: {error.problem}; {done}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
