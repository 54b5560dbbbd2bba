"""Token ids of replayed completions, and padding."""

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.columns import Completion, Prompt, after_prompt, completion_messages
from composer_plugins.errors import DataError


def encode_completion(trainer: GRPOTrainer, prompt: Prompt, side: Completion) -> list[int]:
    """Token ids of a completion of `prompt`, with the end of sequence."""
    if isinstance(prompt, str):
        if not isinstance(side, str):
            raise DataError("prompt", "it is a string, and a completion is messages", "write both one way")
        tokenizer = upstream.tokenizer(trainer)
        ids = tokenizer(side, add_special_tokens=False)["input_ids"]
        ends = bool(ids) and ids[-1] in trainer.eos_token_ids
        return ids if ends else [*ids, tokenizer.eos_token_id]
    whole = upstream.encode_chat(trainer, [*prompt, *completion_messages(side)])
    (start,) = upstream.encode_prompts(trainer, [prompt])
    return after_prompt(whole, start)


def pad(rows: list[list[int]], value: int, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids padded to one width, and a mask that is 0 on padding."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids.to(device), mask.to(device)
