"""One run: training on the codebook task with ComposerGRPOTrainer and some of its channels."""

import copy
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import Channels, Settings

FINAL_STEPS = 10  # the final reward is a mean over these last steps

OnStep = Callable[[int, float], None]


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
    """Draw a codebook, make a model and warm it up."""
    torch.manual_seed(seed)
    tokenizer, model = task.make_tokenizer(), task.make_model()
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
        lr_scheduler_type="constant",
        seed=seed,
        logging_steps=1,
        # A model this small is fastest on one CPU core in float32. No checkpoint is saved.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(channels: Channels, start: Start, settings: Settings, on_step: OnStep) -> Run:
    """Train a copy of the start's model; `on_step(step, reward)` is called after every step."""
    began = time.perf_counter()
    model = copy.deepcopy(start.model)
    greedy_before = task.greedy_accuracy(model, start.tokenizer, start.rows)
    rewards = RewardRecorder(on_step)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = ComposerGRPOTrainer(
            model=model,
            reward_funcs=task.codebook_reward,
            args=trainer_config(channels, start.seed, settings, output_dir),
            train_dataset=Dataset.from_list(start.rows),
            processing_class=start.tokenizer,
            callbacks=[rewards],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    greedy_after = task.greedy_accuracy(model, start.tokenizer, start.rows)
    seconds = time.perf_counter() - began
    return Run(channels, start.seed, rewards.rewards, greedy_before, greedy_after, seconds)


class RewardRecorder(TrainerCallback):
    """Keeps the reward that TRL logs at every step, and calls `on_step` with it."""

    def __init__(self, on_step: OnStep) -> None:
        self.rewards: list[float] = []
        self.on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Called by the trainer at every log. The last one, a summary of the training, has no reward."""
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            self.on_step(state.global_step, self.rewards[-1])


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the warnings and log lines of the libraries; errors are still shown."""
    verbosity = transformers.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("composer_plugins", "trl", "matplotlib")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
