"""A character tokenizer, a two-layer Qwen3 with random weights, and a GRPOTrainer on them: no download."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.testing.tiny_config import tiny_config

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdef?[]_ \n:UA"]
MAX_LENGTH = 32
SCRATCH = tempfile.TemporaryDirectory()  # removed with the process

# Every message is one line "U:..." or "A:...", and an answer ends with <eos>, so that a prompt's
# rendering is a prefix of its conversation's.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}\n"
    "{% else %}A:{{ m['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)

# Of a GRPOConfig: on the CPU, in the dtype of the model, without files.
OPTIONS = {
    "output_dir": SCRATCH.name,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 0,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(SYMBOLS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights, wide enough apart that no distribution is near uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **tiny_config(len(SYMBOLS), 32, max_position_embeddings=MAX_LENGTH, initializer_range=0.2)
    )
    return Qwen3ForCausalLM(config).to(dtype)


def grpo_trainer(rollout: Callable[..., Any]) -> GRPOTrainer:
    """A plain GRPOTrainer in float64, ready to be asked for advantages of scripted completions."""
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 5}
    made = GRPOTrainer(
        model=model(torch.float64),
        reward_funcs=lambda completion_ids, **_: [0.0 for _ in completion_ids],
        args=GRPOConfig(**OPTIONS, **sizes),
        train_dataset=Dataset.from_list([{"prompt": "a?"}]),
        processing_class=tokenizer(),
        rollout_func=rollout,
    )
    made.model.train()
    return made
