"""Tiny models for demos on a CPU, made and trained here, so that nothing is downloaded."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer

OnStep = Callable[[int, float], None]  # of the number of a step and its reward

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


def make_model(tokenizer: PreTrainedTokenizerFast, positions: int, **options: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights (torch's global generator draws them)."""
    hidden, heads = 64, 4
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **options,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM, batches: Iterable[dict[str, torch.Tensor]], steps: int, learning_rate: float
) -> float:
    """Take a supervised step on each of `steps` batches; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches):
        loss = model(**batch).loss
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


class OnReward(TrainerCallback):
    """Calls a function with the number and the reward of every step."""

    def __init__(self, call: OnStep) -> None:
        self.call = call

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Called by the trainer at every log. The last one, a summary of the training, has no reward."""
        if "reward" in logs:
            self.call(state.global_step, float(logs["reward"]))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Dataset,
    config: ComposerGRPOConfig,
    on_step: OnStep = lambda step, reward: None,
    callbacks: Sequence[TrainerCallback] = (),
    make_trainer: Callable[..., ComposerGRPOTrainer] = ComposerGRPOTrainer,
    **options: Any,
) -> list[dict[str, float]]:
    """Train `model` in place with TRL's GRPOTrainer and the composer loss; return the log of every step."""
    trainer = make_trainer(
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
