"""One run: the model trained on a task with some of the channels, and examined on held-out questions."""

import copy
import tempfile
import time
from typing import Any

from datasets import Dataset

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook.options import Channels
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.smollm.asking import Settings, accuracy, subject_of
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.tasks import VERIFIER, Row, Task
from composer_plugins.recipes.smollm.verifier_hints import rollouts, without_hints
from composer_plugins.recipes.tiny import OnStep


def config_of(
    channels: Channels, seed: int, settings: Settings, device: str, folder: str
) -> ComposerGRPOConfig:
    """The trainer's config; a channel that is off has weight 0."""
    on_this_device = tiny.ON_A_CPU | ({} if device == "cpu" else {"use_cpu": False, "bf16": True})
    return ComposerGRPOConfig(
        output_dir=folder,
        policy=settings.policy,
        policy_weight=float("rl" in channels),
        hint_weight=settings.hint_weight if "hint" in channels else 0.0,
        replay_weight=settings.replay_weight if "replay" in channels else 0.0,
        max_steps=settings.steps * settings.num_iterations,
        num_iterations=settings.num_iterations,
        per_device_train_batch_size=settings.batch_size,
        num_generations=settings.num_generations,
        max_completion_length=settings.max_completion_length,
        learning_rate=settings.learning_rate,
        seed=seed,
        **on_this_device,
    )


def train(
    channels: Channels,
    seed: int,
    start: Loaded,
    task: Task,
    rows: list[Row],
    settings: Settings,
    before: float,
    on_step: OnStep,
) -> Run:
    """Train a copy of the model; `on_step(step, reward)` is called after every step."""
    began = time.perf_counter()
    device = start.model.device.type
    own = Loaded(copy.deepcopy(start.model), start.tokenizer)
    options: dict[str, Any] = {"reward_funcs": task.reward}
    if settings.hints == VERIFIER and "hint" in channels:
        options["rollout_func"] = rollouts(subject_of(own, task, rows, settings), task)
        rows = without_hints(rows)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(channels, seed, settings, device, folder)
        data = Dataset.from_list(rows)
        logs = tiny.train(own.model, own.tokenizer, data, config, on_step, **options)
    after = accuracy(own, task, settings)
    rewards = [log["reward"] for log in logs]
    return Run(channels, seed, rewards, before, after, time.perf_counter() - began)
