"""From prompts and replayed completions to token ids, and their padding."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.columns import Prompt, Side
from composer_plugins.errors import DataError


def encode_prompts(trainer: Any, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids as TRL itself makes them of prompts: same chat template, tools and special tokens."""
    return trainer._tokenize_prompts(prompts)[0] if prompts else []


def encode_completion(trainer: Any, prompt: Prompt, side: Side) -> list[int]:
    """Token ids of a completion of `prompt`, ending where a completion ends."""
    if isinstance(prompt, str):
        if not isinstance(side, str):
            raise DataError("the completion is messages and the prompt a string: write both one way")
        ids = trainer._tokenizer(side, add_special_tokens=False)["input_ids"]
        ends = bool(ids) and ids[-1] in trainer.eos_token_ids
        return ids if ends else [*ids, trainer._tokenizer.eos_token_id]
    answer = [{"role": "assistant", "content": side}] if isinstance(side, str) else side
    if answer[0].get("role") != "assistant":
        raise DataError(f"a completion starts with the role {answer[0].get('role')!r}; wanted 'assistant'")
    rendered = trainer.processing_class.apply_chat_template(
        conversation=[[*prompt, *answer]],
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    (whole,) = rendered["input_ids"]
    (start,) = encode_prompts(trainer, [prompt])
    if whole[: len(start)] != start or len(whole) == len(start):
        raise DataError(
            "the chat template renders prompt + completion differently from the prompt alone, so the "
            "completion's tokens cannot be told apart: use a prefix-preserving chat template"
        )
    return whole[len(start) :]


def pad(rows: list[list[int]], value: int, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids padded to one width, and a mask that is 1 on what is not padding."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids.to(device), mask.to(device)
