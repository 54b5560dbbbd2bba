"""A tiny Qwen3 with random weights, and its supervised warm-up. Only torch and transformers are needed."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from composer_plugins.testing.tiny_config import tiny_config


def make_model(tokenizer: PreTrainedTokenizerFast, positions: int, **options: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights (torch's global generator draws them)."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = tiny_config(len(tokenizer), 64, max_position_embeddings=positions, **ends, **options)
    return Qwen3ForCausalLM(Qwen3Config(**config))


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
