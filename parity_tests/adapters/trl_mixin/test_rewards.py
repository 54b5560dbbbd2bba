"""Rewards that cannot be right."""

import re
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer, upstream
from composer_plugins.adapters.trl_mixin.rewards import checked, treated
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from parity_tests.rigs import tiny


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan")), 1e39])
def test_a_reward_that_is_not_finite_names_its_row(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """TRL takes NaN for None. An infinite reward, or one beyond float32, makes advantages 0 or huge."""

    def broken(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [value if i == 2 else 1.0 for i in range(len(completion_ids))]

    monkeypatch.setattr(tiny, "reward", broken)
    message = f"reward broken: the reward of row 2 of the batch is {float(value):g} (prompt '"
    with pytest.raises(DataError, match=re.escape(message)):
        tiny.trainer().train()
    theirs = tiny.trainer(GRPOTrainer, GRPOConfig)
    assert tiny.batch(theirs)["advantages"].isfinite().all()  # no error there


def test_none_stays_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function returns it where it does not apply; TRL warns if none applies."""

    def sometimes(completion_ids: list[list[int]], **_: Any) -> list[Any]:
        return [None if i % 3 else float(i) for i in range(len(completion_ids))]

    monkeypatch.setattr(tiny, "reward", sometimes)
    made = tiny.trainer()
    assert tiny.batch(made)["advantages"].any()
    assert made._rewards.isnan().tolist() == [i % 3 != 0 for i in range(16)]


def test_an_async_reward_function_is_checked_too() -> None:
    async def broken(prompts: list[str], **_: Any) -> list[float]:
        return [float("nan")] * len(prompts)

    coroutine = checked(broken, "broken")(prompts=["a?"], completions=["12"])
    with pytest.raises(DataError, match="reward broken: .* is nan .prompt 'a.', completion '12'"):
        coroutine.send(None)


def test_rewards_may_come_from_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain TRL takes any iterable."""

    def lazy(completion_ids: list[list[int]], **_: Any) -> Any:
        return (float(len(ids)) for ids in completion_ids)

    monkeypatch.setattr(tiny, "reward", lazy)
    theirs = tiny.batch(tiny.trainer(GRPOTrainer, GRPOConfig))["advantages"]
    assert torch.equal(tiny.batch(tiny.trainer())["advantages"], theirs)


BAD_ROWS = {2: float("nan"), 5: float("-inf"), 6: 1e39}


@pytest.mark.parametrize("how", ["zero", "drop"])
def test_a_bad_reward_is_zero_or_leaves_its_completion_out(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The step equals that of a function which returns 0, or None, for these rows, in value and gradient."""
    if how == "drop" and not upstream.leaves_out_unrewarded():
        with pytest.raises(ConfigError, match="on_bad_reward: it is 'drop', and TRL .* set it to 'zero'"):
            tiny.config(on_bad_reward=how)
        return

    def rewards(completion_ids: list[list[int]], instead: Any = None, **_: Any) -> list[Any]:
        own = tiny.reward(completion_ids)
        found = BAD_ROWS if instead is None else dict.fromkeys(BAD_ROWS, instead[0])
        return [found.get(i, reward) for i, reward in enumerate(own)]

    def length(completion_ids: list[list[int]], instead: Any = None, **_: Any) -> list[Any]:
        drop = instead is not None and instead[0] is None
        return [None if drop and i in BAD_ROWS else len(ids) for i, ids in enumerate(completion_ids)]

    def made(cls: type, config: type, **given: Any) -> Any:
        functions = [wraps(one)(partial(one, **given)) for one in (rewards, length)]
        options = {} if cls is GRPOTrainer else {"on_bad_reward": how, "policy": "trl"}
        with monkeypatch.context() as patch:
            patch.setattr(tiny, "reward", functions)
            return tiny.trainer(cls, config, **options)

    theirs = made(GRPOTrainer, GRPOConfig, instead=[0.0 if how == "zero" else None])
    ours = made(ComposerGRPOTrainer, ComposerGRPOConfig)
    with pytest.warns(ComposerWarning, match=f"reward rewards: the reward of row 2 .* {how!r}, so") as seen:
        (found,) = tiny.gradients(ours)
    assert len([one for one in seen if "on_bad_reward" in str(one.message)]) == 1
    (wanted,) = tiny.gradients(theirs)
    assert wanted.any()
    torch.testing.assert_close(found, wanted, rtol=0, atol=tiny.FLOAT32)
    logged = {key: value for line in ours.state.log_history for key, value in line.items()}
    assert float(logged["composer/bad_reward_frac"]) == len(BAD_ROWS) / 16
    assert ours._rewards[[*BAD_ROWS]].isnan().tolist() == [how == "drop"] * len(BAD_ROWS)


@pytest.mark.parametrize("how", ["error", "zero", "drop"])
def test_a_reward_models_nan_names_its_row(how: str) -> None:
    model = torch.nn.Identity()
    made = tiny.trainer()
    made.accelerator = SimpleNamespace(process_index=1)
    made.reward_funcs, made.reward_func_names = [model, tiny.reward], ["judge", "own"]
    rewards = torch.tensor([[1.0, 1.0], [1.0, torch.nan], [1.0, 1.0], [torch.nan, 1.0]])  # of two processes
    message = "reward judge: the reward of row 1 of the batch is nan .prompt 'd"
    if how == "error":
        with pytest.raises(DataError, match=message):
            treated(made, rewards, ["c", "d"], ["1", "2"], how)
        return
    with pytest.warns(ComposerWarning, match=message):
        found = treated(made, rewards, ["c", "d"], ["1", "2"], how)
    last = [0.0, 1.0] if how == "zero" else [torch.nan, torch.nan]  # of row 1 only what does not apply is NaN
    assert torch.equal(found.nan_to_num(9.0), torch.tensor([*rewards[:3].tolist(), last]).nan_to_num(9.0))
    assert checked(model, "judge") is model
