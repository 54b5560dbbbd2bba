"""What the trainer is fed for the first step of SmolLM2: its weights, and a micro-batch for each reply."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_plugins.recipes.smollm.model import load
from parity_tests.rigs import first_step
from parity_tests.rigs.first_step import GROUPS, LENGTH, SIZE, Reply

SEQ_LEN = 128  # more than any prompt and reply
MICRO_BATCHES = GROUPS * SIZE


def write_model(folder: Path) -> None:
    """The model of the wheel in float32."""
    for part in load(None, "cpu"):
        part.save_pretrained(folder)


def micro_batches() -> Iterator[dict[str, Tensor]]:
    """Yield the tensors [1, tokens] of each reply: rollout engine and trainer are the same model.

    The reference is the model with the hint in its prompt.
    """
    of, model = first_step.replies(), load(None, "cpu").model
    model.eval()
    for one, advantage in zip(of, first_step.advantages(of), strict=True):
        assert len(one.prompt) + LENGTH <= SEQ_LEN
        with torch.no_grad():
            own = first_step.logprobs(model, one.prompt, one.tokens)
            teacher = first_step.logprobs(model, one.hinted, one.tokens)
        ids = torch.tensor([*one.prompt, *one.tokens])
        fields = {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": behind(one, torch.ones_like(own)).bool(),
            "inference_logprobs": behind(one, own),
            "ref_logprobs": behind(one, teacher),
            "advantages": behind(one, torch.full_like(own, advantage)),
            "temperatures": torch.ones(len(ids)),
        }
        yield {name: value.unsqueeze(0) for name, value in fields.items()}


def behind(one: Reply, values: Tensor) -> Tensor:
    """Values [reply] behind a 0 for each token of the prompt, [tokens]."""
    return torch.cat([values.new_zeros(len(one.prompt)), values])


def loader(upstream: type) -> type:
    """Upstream's own FakeDataLoader, with these micro-batches."""
    remaining = micro_batches()

    class Recorded(upstream):
        def _get_micro_batch(self, generator: torch.Generator) -> dict[str, Any]:
            fake, given = super()._get_micro_batch(generator), next(remaining)
            length = given["input_ids"].shape[1]
            more = {"sequence_lengths": [length], "env_names": ["arithmetic"] * length}
            more |= {"seq_lens": torch.tensor([length]), "lora_num_tokens": torch.tensor([length]).int()}
            return {**fake, **given, **more}

    return Recorded
