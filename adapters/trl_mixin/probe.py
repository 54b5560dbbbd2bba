"""A tiny GRPOTrainer for `composer-plugins check --as trl`, and a trainer as `teacher` asks it."""

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.errors import ConfigError

SCRATCH = tempfile.TemporaryDirectory(prefix="composer-check-")  # removed with the process
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdef"]

# What a check sets in a trainer: full precision, and no log.
QUIET: Mapping[str, Any] = {
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "bf16": False,
    "fp16": False,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
}


def require_trainer(made: object) -> None:
    """Raise ConfigError unless it is a GRPOTrainer."""
    if not isinstance(made, GRPOTrainer):
        problem = f"it returned {type(made).__name__}, and not a GRPOTrainer"
        raise ConfigError("--trainer", problem, "return a trainer: make_trainer(**overrides) -> GRPOTrainer")


def teacher_subject(trainer: GRPOTrainer) -> dict[str, Any]:
    """What `composer-plugins teacher` asks a trainer for: its policy, rows, rewards and sampling.

    Raises ConfigError for a trainer whose prompts or completions are not made from its rows alone.
    """
    require_trainer(trainer)
    if upstream.has_environments(trainer) or getattr(trainer, "rollout_func", None) is not None:
        problem = "its environments, or its rollout_func, make the prompts and the completions"
        raise ConfigError("--trainer", problem, "return a trainer whose data set has prompts and hints")
    return {
        "model": trainer.accelerator.unwrap_model(trainer.model).eval(),
        "tokenizer": upstream.tokenizer(trainer),
        "rows": trainer.train_dataset,
        "encode": partial(upstream.encode_prompts, trainer),
        "rewards": partial(upstream.rewards, trainer),
        "temperature": trainer.temperature,
        "max_new_tokens": trainer.max_completion_length,
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(SYMBOLS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **ends)


def tiny_trainer(cls: type[GRPOTrainer] = GRPOTrainer, **options: Any) -> GRPOTrainer:
    """A trainer of this class with a random Qwen3 of one layer, on the CPU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "initializer_range": 0.2}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        **sizes,
        **counts,
        **ends,
    )
    own = {
        "output_dir": SCRATCH.name,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "use_cpu": True,
        "gradient_checkpointing": False,
    }
    return cls(
        model=Qwen3ForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(**{**QUIET, **own, **options}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in ("12", "3", "abc", "f0")]),
        processing_class=tokenizer(),
    )
