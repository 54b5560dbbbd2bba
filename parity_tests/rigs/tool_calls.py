"""A GRPO run with tool calls: a byte tokenizer, Qwen3's chat template, and scripted turns of the model."""

import json
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from parity_tests.rigs import tiny

HINT = "The number is below 5."
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'
TURNS = (CALL.format("guess", '{"number": 3}'), CALL.format("guess", '{"number": 8}'), "done<|im_end|>")
QUESTION = [{"role": "user", "content": "Guess."}]
READ = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def calls(arguments: str) -> list[dict[str, Any]]:
    """One call of the tool in READ."""
    return [{"id": "1", "type": "function", "function": {"name": "read", "arguments": arguments}}]


def answer(content: Any, tool_calls: Any) -> list[dict[str, Any]]:
    """A message of the assistant."""
    return [{"role": "assistant", "content": content, "tool_calls": tool_calls}]


def call(path: str) -> list[dict[str, Any]]:
    """A message that calls the tool with this path, and has no text."""
    return answer(None, calls(f'{{"path":"{path}"}}'))


# A pair as a parquet file of recorded traces has it.
PROMPT = [
    {"role": "user", "content": "What is in a?", "tool_calls": None},
    {**call("c")[0], "tool_call_id": None},
    {"role": "tool", "content": "no such file", "tool_call_id": "1", "tool_calls": None},
]
PAIR = {"prompt": PROMPT, "chosen": call("a"), "rejected": call("b"), "tools": json.dumps(READ)}


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
    words = tokenizer()
    config = tiny.model().config
    config.vocab_size, config.max_position_embeddings = len(words), max_length
    config.eos_token_id, config.pad_token_id = words.eos_token_id, words.pad_token_id
    torch.manual_seed(0)
    made = Scripted(config)
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
        dataset=data,
        scripted=False,
        arguments=arguments,
        **{**sizes, **options},
    )


def of_pairs(*, arguments: dict[str, Any] | None = None, max_steps: int = 1, **columns: Any) -> Any:
    """A trainer of the replay channel alone, on two rows of PAIR with these columns in place of its own."""
    options = {"replay_weight": 1.0, "policy_weight": 0.0, "max_steps": max_steps}
    return trainer(rows=[{**PAIR, **columns}] * 2, arguments=arguments or {}, **options)


class Plain:
    """An environment without hints. Its reset completes the prompt."""

    def __init__(self) -> None:
        self._guesses: list[int] = []

    def reset(self, **row: Any) -> str:
        """Begin anew."""
        self._guesses = []
        return f" Start with {row['start']}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: a number from 0 to 9

        Returns:
            Whether it is right.
        """
        self._guesses.append(number)
        if number != 3:
            self._missed()
        return "right" if number == 3 else "too high"

    def _missed(self) -> None:
        """What follows a wrong guess."""

    def get_reward(self) -> float:
        """The fraction of right guesses."""
        return self._guesses.count(3) / max(len(self._guesses), 1)


class Hinting(Plain):
    """The hint is about the turn whose guess was wrong, in the rollouts of the second row."""

    turn: Any = 1

    def __init__(self) -> None:
        super().__init__()
        self.privileged_context: str | None = None
        self.hint_turn: Any = None

    def reset(self, **row: Any) -> str:
        """Begin anew."""
        self._hints = row["start"] == 1
        self.privileged_context = None
        return super().reset(**row)

    def _missed(self) -> None:
        """Give the hint."""
        if self._hints:
            self.privileged_context, self.hint_turn = HINT, self.turn
