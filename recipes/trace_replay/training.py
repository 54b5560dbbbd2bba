"""The demo's training: pairs from a parquet file through the replay channel of TRL's GRPOTrainer, on a CPU.

The model is a Qwen3 of 125 thousand parameters with random weights, and its tokenizer is made from the pairs,
so nothing is downloaded. It is far too small to act; what is seen is that the margins of the pairs rise.
"""

import json
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.recipes import tiny, tiny_model

POSITIONS = 4096
MARGINS = "composer/replay/rewards/margins"
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of these texts, with Qwen3's chat template as TRL has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.add_tokens(TAGS)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = qwen3_chat_template
    return fast


def train(pairs: Path, steps: int) -> list[float]:
    """Train on the pairs of a parquet file, and return the mean margin of each step."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    torch.set_num_threads(1)  # a model this small is fastest with one
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.from_parquet(str(pairs), cache_dir=folder)
        tokenizer = make_tokenizer(map(json.dumps, dataset))
        config = ComposerGRPOConfig(
            output_dir=folder,
            policy_weight=0.0,
            replay_weight=1.0,
            replay_params={"beta": 0.1},
            max_steps=steps,
            per_device_train_batch_size=2 * len(dataset),  # every pair in every step
            num_generations=2,  # the fewest that TRL takes; their rewards count nothing here
            max_completion_length=1,
            learning_rate=1e-3,
            **tiny.ON_A_CPU,
        )
        torch.manual_seed(0)
        model = tiny_model.make_model(tokenizer, POSITIONS)
        logs = tiny.train(model, tokenizer, dataset, config, reward_funcs=_no_reward)
    return [log[MARGINS] for log in logs]


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
