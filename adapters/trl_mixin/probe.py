"""A tiny GRPOTrainer for `check --as trl` and `conform trl`, and a trainer as `teacher` asks it."""

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.errors import ConfigError

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdef?[]_ \n:UA"]
MAX_LENGTH = 32
SCRATCH = tempfile.TemporaryDirectory(prefix="composer-tiny-")  # removed with the process

# Every message is one line "U:..." or "A:...", and an answer ends with <eos>, so that a prompt's
# rendering is a prefix of its conversation's.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}\n"
    "{% else %}A:{{ m['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)

# Of a GRPOConfig: on the CPU, in the dtype of the model, without files.
OPTIONS: Mapping[str, Any] = {
    "output_dir": SCRATCH.name,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 0,
}


def teacher_subject(trainer: Any) -> dict[str, Any]:
    """What `composer-plugins teacher` asks a trainer for: its policy, rows, rewards and sampling.

    Raises ConfigError for a trainer whose prompts or completions are not made from its rows alone.
    """
    if not isinstance(trainer, GRPOTrainer):
        problem = f"it returned {type(trainer).__name__}, and not a GRPOTrainer"
        raise ConfigError("--trainer", problem, "return a trainer: make_trainer() -> GRPOTrainer")
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
    """Two layers with random weights, wide enough apart that no distribution is near uniform."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": len(SYMBOLS)}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": MAX_LENGTH, "pad_token_id": 0, "eos_token_id": 1}
    config = Qwen3Config(**sizes, bos_token_id=None, tie_word_embeddings=True, initializer_range=0.2)
    return Qwen3ForCausalLM(config).to(dtype)


def tiny_trainer(
    cls: type[GRPOTrainer] = GRPOTrainer,
    *,
    dtype: torch.dtype = torch.float32,
    rollout_func: Any = None,
    **options: Any,
) -> GRPOTrainer:
    """A trainer of this class on the CPU, with these options of its config."""
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 5}
    return cls(
        model=model(dtype),
        reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        args=GRPOConfig(**{**OPTIONS, **sizes, **options}),
        train_dataset=Dataset.from_list([{"prompt": "a?"}]),
        processing_class=tokenizer(),
        rollout_func=rollout_func,
    )
