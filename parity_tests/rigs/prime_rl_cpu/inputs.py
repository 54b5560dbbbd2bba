"""What the trainer is fed: a tiny random model on disk, and micro-batches as an orchestrator packs them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from composer_plugins.testing.tiny_config import tiny_config

VOCABULARY = 32
SEQ_LEN = 96
MICRO_BATCHES = 2  # of a step
LENGTHS = (1, 23, 40, 32)  # of the packed sequences; the last ends in padding
PADDING = 9
PROMPT = 5


def write_model(folder: Path) -> None:
    """Two layers of Llama whose next tokens are unequally likely, so that trust regions have work."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    options = {"max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1}
    config = LlamaConfig(**tiny_config(VOCABULARY, 32, initializer_range=0.4, **options))
    LlamaForCausalLM(config).float().save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )


def micro_batch(fake: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """A micro-batch of upstream's fake loader with packed sequences, masks and log-probabilities <= 0.

    A reference is there for all but the last sequence, and weights in every other micro-batch: an RL loss of
    upstream's multiplies by these and does not read the reference.
    """

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(SEQ_LEN, generator=generator)

    mask = torch.cat([torch.arange(length) >= min(PROMPT, length) for length in LENGTHS])
    mask[-PADDING:] = False
    which = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))  # sequence of each token
    advantages = torch.randn(len(LENGTHS), generator=generator)
    fields = {
        "input_ids": torch.randint(2, VOCABULARY, (SEQ_LEN,), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]),
        "loss_mask": mask,
        "inference_logprobs": (0.01 + 0.98 * drawn(0, 1) ** 2).log() * mask,
        "advantages": advantages[which] * mask,
    }
    scored = mask & (which < len(LENGTHS) - 1)  # the last sample has no reference, and packing fills it
    fields["ref_logprobs"] = drawn(-4, 0) * scored
    weights = drawn(0.5, 1.5) * (drawn(0, 1) > 0.2)
    if "rl_weights" in fake and advantages[0] > 0:
        fields["rl_weights"] = weights
    fake.update({name: value.unsqueeze(0) for name, value in fields.items()})
    fake["sequence_lengths"] = list(LENGTHS)
    if "seq_lens" in fake:
        fake["seq_lens"] = torch.tensor(LENGTHS)
    return fake


def loader(upstream: type) -> type:
    """Upstream's own FakeDataLoader, drawing these micro-batches from its own seeds."""

    class Packed(upstream):
        def _get_micro_batch(self, generator: torch.Generator) -> dict[str, Any]:
            return micro_batch(super()._get_micro_batch(generator), generator)

    return Packed
