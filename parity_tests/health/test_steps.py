"""What a step's rollouts, an update of the weights and the pairs of a run show."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_plugins.errors import ComposerWarning
from composer_plugins.health.rules import RULES
from composer_plugins.health.watch import Health, rollouts
from composer_plugins.health.weights import Sample

HALF = torch.tensor([0.0, 1.0] * 8)
GROUPS = [row // 4 for row in range(16)]


def told(steps: list[Any], when: Any) -> list[str]:
    """The metrics of the warnings of these steps."""
    health = Health()
    with pytest.warns(ComposerWarning) as caught:
        for one in steps:
            health.step(when, one)
    return [str(one.message).partition(": ")[0].removeprefix("composer/health/") for one in caught]


def step(rewards: Tensor = HALF, groups: list[Any] = GROUPS, **more: Any) -> dict[str, float]:
    return rollouts(rewards, groups, **more)


SAME = [(1, 2)] * 16
STEPS = {
    "a uid each": ([step(groups=list(range(16)))], "group_of_one_frac"),
    "merged": ([step(groups=[0] * 16) | {"rollouts of a prompt": 8}], "group_size"),
    "most alone": ([step(groups=[0, 0, *range(1, 15)])] * 2, "group_of_one_frac"),
    "all equal": ([step(torch.ones(16))] * 3, "equal_group_frac"),
    "few groups, all equal": ([step(torch.zeros(4), [0, 0, 1, 1])] * 6, "equal_group_frac"),
    "few groups, one reward": ([step(torch.ones(4), [0, 0, 1, 1])] * 3, "equal_group_frac"),
    "one seed": ([step(completions=SAME)] * 2, "same_completion_frac"),
    "one constant reward": ([step(torch.stack([HALF, torch.ones(16)], 1))] * 8, "constant_reward_frac"),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_rollouts_show_is_told_once(name: str) -> None:
    steps, metric = STEPS[name]
    assert told(steps * 2, "rollouts") == [metric]


@pytest.mark.filterwarnings("error:composer/health")
def test_sound_rollouts_say_nothing() -> None:
    """A step without a difference, a group that failed, a sparse reward, a reward that does not apply."""
    health = Health()
    different = [(row,) for row in range(16)]
    sparse = [step(torch.zeros(4), [0, 0, 1, 1])] * 5
    for one in (
        *[step(completions=different)] * 20,
        *[step(torch.ones(16))] * 2,
        *[step(completions=[()] * 16)] * 3,  # masked out, so they are no evidence of a seed
        step(groups=[0, 0, 0, 1, *GROUPS[4:]]),
        *sparse,
        step(torch.stack([HALF, torch.full((16,), torch.nan)], 1)),
    ):
        health.step("rollouts", one)


def test_a_group_of_one_is_no_group_of_equal_rewards() -> None:
    assert step(groups=list(range(16)))["equal groups"] == 0 == step()["equal groups"]
    assert step(torch.ones(16))["equal groups"] == 4


def updated(weight: Tensor, change: Tensor, rate: float = 1e-3, gradient: float = 1.0) -> dict[str, Any]:
    """What an update of these weights shows."""
    parameters = [nn.Parameter(weight.clone()), nn.Parameter(torch.zeros(3), requires_grad=False)]
    parameters[0].grad = torch.full_like(weight, gradient)
    sample = Sample(parameters)
    with torch.no_grad():
        parameters[0] += change.to(weight.dtype)
    return {"learning rate": rate, **sample.compared()}


ONES = torch.ones(256)
UPDATES = {
    "moved_frac": [updated(ONES, torch.zeros(256))] * 2,
    "learning_rate": [updated(ONES, torch.zeros(256), rate=0.0)] * 3,
    "no_gradient": [updated(ONES, ONES, gradient=0.0)] * 7,
}


@pytest.mark.parametrize("metric", UPDATES)
def test_what_an_update_shows_is_told_once(metric: str) -> None:
    assert told(UPDATES[metric] * 2, "weights") == [metric]


def test_updates_below_the_last_place_are_told() -> None:
    """bfloat16 has 8 bits: 1 + 1e-5 is 1."""
    change = torch.where(torch.arange(256) < 12, 0.1, 1e-5)
    assert told([updated(ONES.bfloat16(), change)] * 6, "weights") == ["moved_frac"]


@pytest.mark.filterwarnings("error:composer/health")
def test_sound_updates_and_a_warm_up_say_nothing() -> None:
    health = Health()
    for one in [updated(ONES, torch.zeros(256), rate=0.0)] * 2 + [updated(ONES, 1e-3 * ONES)] * 5:
        health.step("weights", one)


def test_a_margin_that_falls_is_told_and_a_noisy_one_is_not() -> None:
    torch.manual_seed(0)
    falling, noisy = Health(), Health()
    one = torch.tensor(2.0)
    for _ in range(40):
        noisy.margin(torch.randn(()), one)
    with pytest.warns(ComposerWarning, match="the margin of the pairs has fallen over 16 steps, to -"):
        for i in range(20):
            falling.margin(-0.1 * i + 0.1 * torch.randn(()), one)
            falling.margin(torch.zeros(()), torch.zeros(()))  # a batch without a pair


def test_each_rule_has_words_for_its_numbers() -> None:
    from composer_plugins.health.measuring import Window

    for rule in RULES:
        text = rule.described(Window({"tokens": 1.0, "rows": 1.0}))
        assert "{" not in text and len(text) > 30 and not rule.remedy.endswith(".")
