"""Forward passes that return logits: plain calls of the model, which TRL's fused head leaves unchanged."""

import inspect
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.kernels.masking import at_least_float32

PROBE = 8  # tokens of the row that `counts_padding` compares with and without padding


def completion_logits(
    trainer: GRPOTrainer,
    model: Any,
    ids: Tensor,
    attention_mask: Tensor,
    completion_length: int,
    temperature: float,
) -> Tensor:
    """Logits [B, completion_length, V] that predict the last `completion_length` tokens of each row.

    They are divided by `temperature`. At the sampling temperature, which TRL's own log-probabilities have,
    they are the distributions that completions are sampled from.
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
    return logits[:, -keep:-1] / temperature


def counts_padding(trainer: GRPOTrainer) -> bool:
    """Whether padding on the left moves the positions of a row in TRL's forward pass of this model.

    TRL passes no position_ids. A model with absolute positions, such as GPT-2, then counts the padding, and
    the log-probabilities of a row depend on the longest prompt of its batch. Rotary positions are relative.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if any("rotary" in type(module).__name__.lower() for module in policy.modules()):
        return False
    row = torch.arange(PROBE, device=trainer.accelerator.device)[None] % text_config(trainer).vocab_size
    padding = torch.zeros_like(row)
    was_training = policy.training
    policy.eval()
    try:
        with torch.no_grad():
            alone = policy(input_ids=row, attention_mask=padding + 1, use_cache=False).logits[0, -1].float()
            ids, attention = torch.cat([padding, row], 1), torch.cat([padding, padding + 1], 1)
            padded = policy(input_ids=ids, attention_mask=attention, use_cache=False).logits[0, -1].float()
    finally:
        policy.train(was_training)
    tolerance = 16 * torch.finfo(policy.dtype).eps * float((alone - alone.mean()).abs().max())
    return float((padded - alone).abs().max()) > tolerance


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log pi(y_t) [B, T] of the tokens `ids`, in nats, in float32 at least."""
    return torch.log_softmax(at_least_float32(logits), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def text_config(trainer: GRPOTrainer) -> Any:
    """The config of the language model."""
    return trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()


def longest_input(trainer: GRPOTrainer) -> int | None:
    """The number of tokens that the model takes; None where its config does not say."""
    return getattr(text_config(trainer), "max_position_embeddings", None)
