"""What real TRL runs are warned of, what they log, and that measuring changes no number of theirs."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from composer_plugins.errors import ComposerWarning
from composer_plugins.health.watch import Health
from parity_tests.rigs import tiny


def by_parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(ids) % 5) / 4 + 0.01 * len(ids) for ids in completion_ids]


def ones(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def large(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1e5 * reward for reward in by_parity(completion_ids)]


def run(monkeypatch: pytest.MonkeyPatch, reward: Any = by_parity, **options: Any) -> Any:
    """A trainer after 12 steps of its own sampling."""
    monkeypatch.setattr(tiny, "reward", reward)
    sampling = {"temperature": 1.0, "top_k": 0, "scripted": False, "max_completion_length": 24}
    sizes = {"max_steps": 12, "num_generations": 8, "learning_rate": 1e-3, "health": True}
    torch.manual_seed(0)
    made = tiny.trainer(dataset=tiny.rows(32), **{**sampling, **sizes, **options})
    made.train()
    return made


def some(names: Iterable[str], *first: str) -> list[Any]:
    """These names, of which all but the first ones are slow."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in names]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "top_p": ({"policy": "grpo", "top_p": 0.9}, "surprise"),
    "top_k, TRL's own loss": ({"top_k": 5}, "surprise"),
    "temperature": ({"policy": "gspo", "generation_kwargs": {"temperature": 0.6}}, "surprise"),
    "no learning rate": ({"policy": "grpo", "learning_rate": 0.0}, "learning_rate"),
    "bf16 weights": ({"policy": "grpo", "dtype": torch.bfloat16, "learning_rate": 1e-6}, "moved_frac"),
    "equal rewards": ({"policy": "grpo", "reward": ones}, "equal_group_frac"),
    "raw rewards": ({"policy": "grpo", "reward": large, "scale_rewards": "none"}, "advantage_max"),
    "a clip on policy": ({"policy": "grpo", "policy_params": {"clip_high": 0.1}}, "ratio_moved_frac"),
    "greedy": (
        {"policy": "grpo", "generation_kwargs": {"do_sample": False}},
        "same_completion_frac surprise",
    ),
}


@pytest.mark.parametrize("name", some(FAULTS, "top_p", "equal rewards"))
@pytest.mark.filterwarnings("ignore:.*do_sample")
def test_a_faulty_run_is_told_so_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, metrics = FAULTS[name]
    with pytest.warns(ComposerWarning) as caught:
        run(monkeypatch, **options)
    told = [
        str(one.message).partition(": ")[0] for one in caught if issubclass(one.category, ComposerWarning)
    ]
    assert told == [f"composer/health/{metric}" for metric in metrics.split()]


SOUND: dict[str, dict[str, Any]] = {
    "TRL's own loss": {},
    "two updates of a generation": {"policy": "dapo", "num_iterations": 2},
    "micro-batches": {"policy": "grpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "a warm-up": {"policy": "cispo", "warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"},
}


@pytest.mark.parametrize("name", some(SOUND, "two updates of a generation"))
@pytest.mark.filterwarnings("error:composer/health")
def test_a_sound_run_logs_its_metrics_and_is_told_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(monkeypatch, **SOUND[name])
    names = {"composer/health/surprise", "composer/health/zero_adv_frac"}
    assert all(names <= log.keys() for log in made.state.log_history if "reward" in log)
    surprise = [log["composer/health/surprise"] for log in made.state.log_history if "reward" in log]
    assert abs(sum(surprise) / len(surprise)) < 0.2 and max(map(abs, surprise)) > 0


def test_measuring_changes_no_weight_and_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"policy": "gspo", "beta": 0.0, "max_steps": 3}
    with_, without = (run(monkeypatch, **options, health=on) for on in (True, False))
    for one, other in zip(with_.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not [key for log in without.state.log_history for key in log if "health" in key]


def test_margins_and_teachers_of_the_channels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    margins = list[tuple[float, float]]()
    monkeypatch.setattr(Health, "margin", lambda self, *sums: margins.append(tuple(map(float, sums))))
    made = tiny.trainer(replay_weight=1.0, hint_weight=1.0, health=True, max_steps=3)
    logged = tiny.logged(made, "composer/replay/rewards/margins")
    assert [total / pairs for total, pairs in margins] == logged and len(logged) == 3
    whole = made._health.measured.judge.windows["equal"]
    assert whole["hint tokens"] > 0 and whole["max teacher gap"] > 0.1
