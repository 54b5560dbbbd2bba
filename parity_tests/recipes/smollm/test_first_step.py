"""The first step of SmolLM2 on recorded replies, in TRL's trainer and by PRIME-RL's call of our loss."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.recipes import tiny
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task
from parity_tests.rigs import first_step
from parity_tests.rigs.first_step import GROUPS, HINT, LENGTH, OBJECTIVES, SIZE, Found, Objective, check


def of_trl(start: Loaded, folder: Path, objective: Objective) -> Found:
    """What GRPOTrainer logs of its first step, with the recorded replies in place of its own."""
    task, of = make_task(ARITHMETIC), first_step.replies()
    left = {tuple(one.prompt): [other.tokens for other in of if other.prompt == one.prompt] for one in of}
    config = ComposerGRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=LENGTH,
        scale_rewards="none",
        policy=objective.policy,
        **(HINT if objective.hint else {}),
        **tiny.ON_A_CPU,
    )
    rows = [task.rows[one.question] for one in of[::SIZE]]
    trainer = ComposerGRPOTrainer(
        model=copy.deepcopy(start.model),
        reward_funcs=task.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=start.tokenizer,
    )

    def generate(prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [left[tuple(prompt)].pop(0) for prompt in prompts], None

    trainer._generate_single_turn = generate
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] == sum(one.reward for one in of) / len(of)
    return Found(log["loss"], log["grad_norm"])


def of_prime_rl(start: Loaded, policy: str, hint: dict[str, Any]) -> Found:
    """The loss of each sequence by PRIME-RL's call, divided by the batch's tokens as its trainer does."""
    of, model = first_step.replies(), start.model
    model.zero_grad()
    count, value = sum(len(one.tokens) for one in of), 0.0
    for one, advantage in zip(of, first_step.advantages(of), strict=True):
        own = first_step.logprobs(model, one.prompt, one.tokens)
        with torch.no_grad():
            teacher = first_step.logprobs(model, one.hinted, one.tokens)
        inputs = SimpleNamespace(
            trainer_logprobs=own,
            inference_logprobs=own.detach(),
            ref_logprobs=teacher if hint else None,
            advantages=torch.full_like(teacher, advantage),
            loss_mask=torch.ones(len(one.tokens), dtype=torch.bool),
            loss_weights=None,
        )
        loss = loss_fn(inputs, policy=policy, old_policy="rollout", **hint).loss / count
        loss.backward()
        value += float(loss.detach())
    return Found(value, first_step.norm_of_gradient(model))


@pytest.mark.parametrize("objective", ["dapo", "grpo+hint"])
def test_trls_first_step_has_the_loss_and_gradient_of_the_formula(
    smollm: Loaded, tmp_path: Path, objective: str
) -> None:
    check(of_trl(smollm, tmp_path, OBJECTIVES[objective]), objective)


@pytest.mark.parametrize("objective", ["dapo", "dapo+hint"])
def test_prime_rls_call_has_the_loss_and_gradient_of_the_formula(smollm: Loaded, objective: str) -> None:
    chosen = OBJECTIVES[objective]
    check(of_prime_rl(smollm, chosen.policy, HINT if chosen.hint else {}), objective)
