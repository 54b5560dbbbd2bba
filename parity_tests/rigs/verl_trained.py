"""Overrides and comparisons that the tests of main_ppo share."""

import re
from collections.abc import Callable

import torch

from composer_plugins.recipes.verl.on_a_cpu.overrides import COMPOSER_CONFIG
from composer_plugins.recipes.verl.on_a_cpu.runner import Run

STEPS = 2
LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = (
    "algorithm.adv_estimator=composer",
    "+algorithm.composer.advantage=grpo@verl",
    "+algorithm.composer.policy=grpo@verl",
    "+algorithm.composer.policy_params={clip_low: 0.1, clip_high: 0.15, dual_clip: 1.2}",
    f"{LOSS}.loss_mode=composer/grpo",
    f"{LOSS}._target_={COMPOSER_CONFIG}",
    f"+{LOSS}.composer=${{algorithm.composer}}",
)
THEIRS = (
    "algorithm.adv_estimator=grpo",
    f"{LOSS}.loss_mode=vanilla",
    "actor_rollout_ref.actor.clip_ratio_low=0.1",
    "actor_rollout_ref.actor.clip_ratio_high=0.15",
    "actor_rollout_ref.actor.clip_ratio_c=1.2",
)
SYNC = (*OURS, "trainer.v1.trainer_mode=composer_sync")
REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0")
Trained = Callable[..., Run]


def finished(done: Run) -> Run:
    """The run, after the assertion that it finished and changed the parameters."""
    assert done.code == 0, done.log[-6000:]
    assert len(done.metrics) == STEPS and len(done.parameters) == STEPS + 1
    assert apart(done.parameters[-1], done.parameters[0]) > 1e-3, "steps that move nothing prove nothing"
    return done


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of parameters."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def composers(done: Run) -> list[dict[str, float]]:
    """The metrics of our losses at each step, without those of health."""
    own = re.compile("actor/composer/(?!health/)")
    return [{name: value for name, value in step.items() if own.match(name)} for step in done.metrics]
