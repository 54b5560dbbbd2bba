"""One run: the model trained on a task with some of the channels, and examined on held-out questions."""

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook.options import Channels
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.prompts import prompt_with_answer
from composer_plugins.recipes.smollm.tasks import Row, Task
from composer_plugins.recipes.tiny import OnStep
from composer_plugins.teacher.subject import Subject, chat_encoder


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    steps: int = 15
    batch_size: int = 16
    num_generations: int = 4
    max_completion_length: int = 14
    learning_rate: float = 1e-5
    hint_weight: float = 1.0
    replay_weight: float = 0.5
    policy: str = "dapo"


def subject_of(loaded: Loaded, task: Task, rows: Sequence[Row], settings: Settings) -> Subject:
    """The model with these rows, to draw completions from."""

    def rewards(rows: Any, completions: Any, ids: Any) -> list[float | None]:
        return [*task.reward(completions, [row["answer"] for row in rows])]

    return Subject(
        loaded.model,
        loaded.tokenizer,
        rows,
        chat_encoder(loaded.tokenizer),
        rewards,
        max_new_tokens=settings.max_completion_length,
    )


def accuracy(loaded: Loaded, task: Task, settings: Settings) -> float:
    """The share of held-out questions that the model answers rightly, decoded greedily, without a hint."""
    loaded.model.eval()
    made = subject_of(loaded, task, task.held_out, settings)
    completions = made.completions(made.encode([row["prompt"] for row in task.held_out]), sampled=False)
    return sum(made.rewarded(task.held_out, completions)) / len(task.held_out)


def with_pairs(loaded: Loaded, task: Task, settings: Settings, seed: int) -> list[Row]:
    """The task's rows with pairs of replies: two teachers answer, and the verifier compares them.

    One teacher is the model with the worked answer in its prompt, decoded greedily; the other is the model
    without it, sampled. A row of which the first is right and the second wrong has a pair.
    """
    torch.manual_seed(seed)
    made = subject_of(loaded, task, task.rows, settings)
    shown = [prompt_with_answer(row) for row in task.rows]
    better = made.completions(made.encode(shown), sampled=False)
    worse = made.completions(made.encode([row["prompt"] for row in task.rows]), sampled=True)
    rewards = zip(made.rewarded(task.rows, better), made.rewarded(task.rows, worse), strict=True)
    texts = zip(made.texts(better), made.texts(worse), strict=True)
    rows = []
    for row, (good, bad), (chosen, rejected) in zip(task.rows, rewards, texts, strict=True):
        sides = (chosen.strip(), rejected.strip()) if good > bad and rejected.strip() else (None, None)
        rows.append({**row, "chosen": sides[0], "rejected": sides[1]})
    return rows


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
        max_steps=settings.steps,
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
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(channels, seed, settings, device, folder)
        data = Dataset.from_list(rows)
        logs = tiny.train(own.model, own.tokenizer, data, config, on_step, reward_funcs=task.reward)
    after = accuracy(own, task, settings)
    rewards = [log["reward"] for log in logs]
    return Run(channels, seed, rewards, before, after, time.perf_counter() - began)
