"""One run: training on the codebook task with ComposerGRPOTrainer and some of its channels."""

import copy
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.recipes import tiny, tiny_model
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import Channels, Settings
from composer_plugins.recipes.tiny import OnStep

FINAL_STEPS = 10  # the final reward is a mean over these last steps


@dataclass(frozen=True)
class Start:
    """What all runs of one seed start from: a codebook, and a model that knows the format and no answer."""

    seed: int
    rows: list[dict[str, Any]]
    tokenizer: PreTrainedTokenizerFast
    model: Qwen3ForCausalLM


@dataclass(frozen=True)
class Run:
    """The results of a run: the mean reward of every step's completions, and accuracies without a hint."""

    channels: Channels
    seed: int
    rewards: list[float]
    greedy_before: float
    greedy_after: float
    seconds: float

    @property
    def start_reward(self) -> float:
        """The reward of the first step, whose completions are sampled before the first update."""
        return self.rewards[0]

    @property
    def final_reward(self) -> float:
        """The mean reward of the last steps."""
        last = self.rewards[-FINAL_STEPS:]
        return sum(last) / len(last)


def make_start(seed: int) -> Start:
    """Draw a codebook, make a model and warm it up. The model is too small for more than one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = task.make_tokenizer()
    model = tiny_model.make_model(tokenizer, positions=64)
    task.warm_up(model, tokenizer, seed)
    return Start(seed, task.codebook_rows(seed), tokenizer, model)


def trainer_config(channels: Channels, seed: int, settings: Settings, output_dir: str) -> ComposerGRPOConfig:
    """The trainer's config; a channel that is off has weight 0 and costs nothing."""
    options: dict[str, Any] = {}
    if "hint" in channels:
        options |= {"hint_weight": settings.hint_weight, "hint_teacher": settings.teacher}
        options |= {"teacher_prompt_template": task.PROMPT_WITH_HINT}
        options |= {"hint_ema_rate": settings.hint_ema_rate} if settings.teacher == "ema" else {}
    if "replay" in channels:
        options |= {"replay_weight": settings.replay_weight, "replay_params": {"beta": settings.replay_beta}}
    return ComposerGRPOConfig(
        **options,
        output_dir=output_dir,
        policy=settings.policy,
        policy_weight=float("rl" in channels),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        num_generations=settings.num_generations,
        max_completion_length=task.COMPLETION_LENGTH,
        learning_rate=settings.learning_rate,
        seed=seed,
        **tiny.ON_A_CPU,
    )


def train(channels: Channels, start: Start, settings: Settings, on_step: OnStep) -> Run:
    """Train a copy of the start's model; `on_step(step, reward)` is called after every step."""
    began = time.perf_counter()
    model = copy.deepcopy(start.model)
    greedy_before = task.greedy_accuracy(model, start.tokenizer, start.rows)
    with tempfile.TemporaryDirectory() as output_dir:
        config = trainer_config(channels, start.seed, settings, output_dir)
        rows = Dataset.from_list(start.rows)
        reward = task.codebook_reward
        logs = tiny.train(model, start.tokenizer, rows, config, on_step, reward_funcs=reward)
    greedy_after = task.greedy_accuracy(model, start.tokenizer, start.rows)
    seconds = time.perf_counter() - began
    return Run(channels, start.seed, [log["reward"] for log in logs], greedy_before, greedy_after, seconds)
