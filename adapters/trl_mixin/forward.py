"""Forward passes that return logits: plain calls of the model, which TRL's fused head leaves unchanged."""

import inspect
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.kernels.masking import at_least_float32


def completion_logits(
    trainer: GRPOTrainer, model: Any, ids: Tensor, attention_mask: Tensor, completion_length: int
) -> Tensor:
    """Logits [B, completion_length, V] that predict the last `completion_length` tokens of each row.

    They are divided by the sampling temperature, as TRL's own log-probabilities are. So student, teacher and
    reference are the distributions that completions are sampled from.
    """
    keep = completion_length + 1  # the logits at t predict the token at t + 1
    # A model with absolute positions would otherwise count the padding on the left.
    options = {"logits_to_keep": keep, "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)}
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # PEFT
    accepted = inspect.signature(type(policy).forward).parameters  # some models have no such argument
    options = {name: value for name, value in options.items() if name in accepted}
    with trainer.accelerator.autocast():
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False, **options).logits
    return logits[:, -keep:-1] / trainer.temperature


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log pi(y_t) [B, T] of the tokens `ids`, in nats, in float32 at least."""
    return torch.log_softmax(at_least_float32(logits), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def text_config(trainer: GRPOTrainer) -> Any:
    """The config of the language model."""
    return trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()


def longest_input(trainer: GRPOTrainer) -> int | None:
    """The number of tokens that the model takes; None where its config does not say."""
    return getattr(text_config(trainer), "max_position_embeddings", None)
