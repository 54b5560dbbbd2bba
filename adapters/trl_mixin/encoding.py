"""From prompts and replayed completions to token ids, and their padding."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.columns import Prompt, Side, after_prompt, answer_of
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
    rendered = trainer.processing_class.apply_chat_template(
        conversation=[[*prompt, *answer_of(side)]],
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    (whole,) = rendered["input_ids"]
    (start,) = encode_prompts(trainer, [prompt])
    return after_prompt(whole, start)


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
