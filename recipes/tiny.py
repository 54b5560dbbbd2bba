"""Tiny models for demos on a CPU, made and trained here, so that nothing is downloaded."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer

OnStep = Callable[[int, float], None]  # of the number of a batch of completions and its reward

# Of a trainer's config. A model this small is fastest on one CPU core in float32. No checkpoint is saved.
ON_A_CPU: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class OnReward(TrainerCallback):
    """Calls a function with the number and the reward of every batch of completions."""

    def __init__(self, call: OnStep) -> None:
        self.call, self.batches = call, 0

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Called by the trainer at every log. One that has no new completions has no reward."""
        if "reward" in logs:
            self.batches += 1
            self.call(self.batches, float(logs["reward"]))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Dataset,
    config: ComposerGRPOConfig,
    on_step: OnStep = lambda step, reward: None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> list[dict[str, float]]:
    """Train `model` in place with TRL's GRPOTrainer and the composer loss; return the log of every batch."""
    trainer = ComposerGRPOTrainer(
        model=model,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[OnReward(on_step), *callbacks],
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the warnings and log lines of the libraries; errors are still shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
