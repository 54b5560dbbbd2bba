"""Running a GRPOTrainer on given rows and reading its gradient, as `composer-plugins check` does."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.upstream import replace_rollouts, watch_logprobs
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_OPTIONS

__all__ = [
    "LOSS_OPTIONS",
    "QUIET",
    "TRL_FIELDS",
    "around_loss",
    "generated_rows",
    "gradients",
    "require_trainer",
    "teacher_subject",
    "token_gradients",
]
SCRATCH = tempfile.TemporaryDirectory(prefix="composer-check-")  # removed with the process
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789abcdef"]

# What a check sets in every trainer: one step in full precision, whose gradient is not clipped or logged.
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

Rows = dict[str, Any]


TRL_FIELDS = {field.name for field in fields(GRPOConfig)}


def require_trainer(made: object) -> None:
    """Raise ConfigError unless it is a GRPOTrainer."""
    if not isinstance(made, GRPOTrainer):
        problem = f"it returned {type(made).__name__}, and not a GRPOTrainer"
        raise ConfigError("--trainer", problem, "return a trainer: make_trainer(**overrides) -> GRPOTrainer")


class Recorder(TrainerCallback):
    """The gradient of every optimizer step, flat and in float64, before the step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Keep the gradient of the model's parameters."""
        parameters = [p for p in given["model"].parameters() if p.requires_grad]
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        self.gradients.append(torch.cat(parts).detach().double().clone())


def generated_rows(trainer: GRPOTrainer) -> Rows:
    """The rows of the trainer's first generation batch, as its loss gets them."""
    found: list[Rows] = []

    def keep(own: Callable[..., Rows], prompts: Any) -> Rows:
        found.append(own(prompts))
        raise Enough

    replace_rollouts(trainer, keep)
    trainer.remove_callback(PrinterCallback)
    with suppress(Enough):
        trainer.train()
    return found[0]


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


class Enough(Exception):
    """Ends a training run whose rows are known."""


def nothing(given: object) -> None:
    """Do nothing."""


def around_loss(
    trainer: GRPOTrainer, before: Callable[[Rows], object] = nothing, after: Callable[[Any], object] = nothing
) -> None:
    """Call `before` with the inputs of every micro-batch, and `after` with what its loss has returned."""
    own = trainer.compute_loss

    def compute_loss(model: Any, inputs: Rows, *given: Any, **more: Any) -> Any:
        before(inputs)
        loss = own(model, inputs, *given, **more)
        after(loss)
        return loss

    trainer.compute_loss = compute_loss


def gradients(trainer: GRPOTrainer, rows: Rows, seed: int | None = None) -> list[Tensor]:
    """Train on these rows; the gradient of each optimizer step. A seed is set before each loss."""
    if seed is not None:
        around_loss(trainer, lambda inputs: set_seed(seed))
    recorder = Recorder()
    trainer.add_callback(recorder)
    train_on(trainer, rows)
    return recorder.gradients


class TokenGradients(NamedTuple):
    """The micro-batch of a step, and the gradient of the policy's log-probability of each token."""

    mask: Tensor  # [rows, tokens]
    advantages: Tensor  # [rows] or [rows, tokens], in the order of the mask's rows
    gradient: Tensor  # [rows, tokens]


def token_gradients(trainer: GRPOTrainer, rows: Rows) -> TokenGradients | None:
    """Train one step on these rows, and return the gradients of its tokens.

    None if the loss does not ask the trainer for log-probabilities of that shape.
    """
    masks, advantages, found = list[Tensor](), list[Tensor](), list[Tensor]()

    def keep(logprobs: Tensor) -> None:
        logprobs.retain_grad()
        found.append(logprobs)

    def look(inputs: Rows) -> None:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        masks.append(mask.bool().clone())
        advantages.append(inputs["advantages"].clone())

    around_loss(trainer, look)
    watch_logprobs(trainer, keep)
    train_on(trainer, rows, shuffle=0)
    if len(masks) != 1 or not found or any(x.shape != masks[0].shape for x in found):
        return None
    parts = [torch.zeros_like(x) if x.grad is None else x.grad for x in found]
    return TokenGradients(masks[0], advantages[0], torch.stack(parts).sum(0))


def train_on(trainer: GRPOTrainer, rows: Rows, shuffle: int | None = None) -> None:
    """Train on these rows, without dropout, perhaps with a seed of the order that TRL gives them."""
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in rows.items()}

    def give(own: Callable[..., Rows], prompts: Any) -> Rows:
        if shuffle is not None:
            set_seed(shuffle)
        return dict(copies)

    replace_rollouts(trainer, give)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


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
