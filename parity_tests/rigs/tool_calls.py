"""A GRPO run with tool calls: a byte tokenizer, Qwen3's chat template, and scripted turns of the model."""

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from parity_tests.rigs import tiny

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'
TURNS = (CALL.format("guess", '{"number": 3}'), CALL.format("guess", '{"number": 8}'), "done<|im_end|>")
QUESTION = [{"role": "user", "content": "Guess."}]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and Qwen3's special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[2], pad_token=special[0])
    made.add_tokens(tags)
    made.add_special_tokens({"additional_special_tokens": special[1:2]})
    made.chat_template = qwen3_chat_template
    return made


class Scripted(Qwen3ForCausalLM):
    """A model whose turns are those of TURNS; its log-probabilities are its own."""

    tokenizer: PreTrainedTokenizerFast
    turns: tuple[str, ...] = TURNS

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Each prompt, and the turn that follows the tool responses in it."""
        ends = []
        for row in input_ids:
            turn = self.tokenizer.decode(row).count("<tool_response>")
            ends.append(self.tokenizer(self.turns[min(turn, len(self.turns) - 1)])["input_ids"])
        longest = max(map(len, ends))
        padding = self.tokenizer.pad_token_id
        padded = [[*end, *[padding] * (longest - len(end))] for end in ends]
        return torch.cat([input_ids, torch.tensor(padded)], 1)


def model(max_length: int = 4096) -> Scripted:
    """Random weights, with the tokenizer's vocabulary."""
    torch.manual_seed(0)
    words = tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    made = Scripted(
        Qwen3Config(vocab_size=len(words), max_position_embeddings=max_length, **sizes, **heads, **ends)
    )
    made.tokenizer = words
    return made


def trainer(*, max_length: int = 4096, rows: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    """A trainer of two prompts with two completions each; `options` as in `tiny.trainer`."""
    made = model(max_length)
    arguments = {"processing_class": made.tokenizer, **options.pop("arguments", {})}
    data = [{"prompt": QUESTION, "start": i} for i in range(2)] if rows is None else rows
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 400}
    return tiny.trainer(
        policy_model=made,
        dataset=Dataset.from_list(data),
        scripted=False,
        arguments=arguments,
        **{**sizes, **options},
    )
