"""A tiny Qwen3 that calls the tool by itself after a supervised warm-up; nothing is downloaded.

The warm-up's functions compute what was drawn anew for every row. So the model learns the format of a call,
and to read from a failing test what the function should compute, but nothing about the functions of any task.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl.chat_template_utils import get_training_chat_template, qwen3_chat_template

from composer_plugins.recipes import tiny_model
from composer_plugins.recipes.openenv.tasks import (
    EXPRESSIONS,
    HELPERS,
    MODULES,
    NAMES,
    Task,
    draw_task,
    function_source,
)
from composer_plugins.recipes.openenv.trl_tools import DeletedFunctionTools

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PAD, END = SPECIAL[0], SPECIAL[2]
TOOLS = [get_json_schema(DeletedFunctionTools.write_function)]
# The prompts end with an empty reasoning block, so that the model begins with the call.
CHAT = {"enable_thinking": False}
LONGEST = 512  # tokens of a prompt with a hint and a completion


def conversation(draw: random.Random, *, hinted: bool) -> list[dict[str, Any]]:
    """A rollout of the warm-up: an attempt at random, and after a failed test the right one.

    With a hint, the failing test stands in the prompt, and the first attempt is right.
    """
    right, guess = draw.choice(EXPRESSIONS), draw.choice(EXPRESSIONS)
    name = draw.choice(NAMES)
    task = draw_task(draw, name, right)
    prompt = task.prompt
    if hinted:
        prompt, guess = f"{prompt}\n\n{failure(task, guess)}", right
    messages = [{"role": "user", "content": prompt}, attempt(name, guess)]
    if guess != right:
        messages += [tool(failure(task, guess)), attempt(name, right)]
    return [*messages, tool(f"all {len(task.cases)} tests pass"), {"role": "assistant", "content": "done"}]


def failure(task: Task, guess: str) -> str:
    """The first failing test of a wrong expression, as the verifier words it."""
    case = task.cases[0]
    a, b = case.arguments
    value = eval(guess, {"a": a, "b": b, "max": max, "min": min})  # one of EXPRESSIONS
    return f"{task.call(case)} should be {case.expected}, but it is {value}"


def attempt(name: str, expression: str) -> dict[str, Any]:
    """A turn that calls the tool."""
    arguments = {"source": function_source(name, expression)}
    call = {"type": "function", "function": {"name": "write_function", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool(text: str) -> dict[str, Any]:
    """A turn of the tool."""
    return {"role": "tool", "name": "write_function", "content": text}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word that varies, and one for each text between two of them; other text by bytes.

    The special tokens and the chat template are Qwen3's.
    """
    words = [*EXPRESSIONS, *NAMES, *HELPERS, *MODULES]
    escaped = ["".join(f"\\{c}" if c in "()*+" else c for c in word) for word in words]
    pattern = Regex("|".join([*escaped, "(should be )?[0-9]+"]))
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = _tokenizer(cut, list(vocabulary))
    for text in rollouts(tokenizer, random.Random(0), 400, tokenize=False):
        for tag in (*SPECIAL, *TAGS):
            text = text.replace(tag, SPECIAL[0])
        for part in text.split(SPECIAL[0]):
            vocabulary |= dict.fromkeys(piece for piece, _ in cut.pre_tokenize_str(part))
    return _tokenizer(cut, list(vocabulary))


def rollouts(
    tokenizer: PreTrainedTokenizerFast, draw: random.Random, count: int, **options: Any
) -> list[Any]:
    """Rollouts of the warm-up in the training chat template, every second one with a hint."""
    template = get_training_chat_template(tokenizer)
    common = {"tools": TOOLS, "chat_template": template, **CHAT, **options}
    drawn = (conversation(draw, hinted=i % 2 == 0) for i in range(count))
    return [tokenizer.apply_chat_template(one, **common) for one in drawn]


def _tokenizer(cut: Any, vocabulary: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    )
    core.pre_tokenizer, core.decoder = cut, decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A tiny model with random weights."""
    # At an initializer_range of 0.02 the warm-up takes three times as many steps.
    return tiny_model.make_model(tokenizer, LONGEST, initializer_range=0.1)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, *, steps: int = 150
) -> float:
    """Supervised steps on the turns of the assistant; the loss of the last step."""
    draw = random.Random(seed)
    masked = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = rollouts(tokenizer, draw, 1000, **masked)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(steps):
            chosen = draw.sample(encoded, 32)
            ids = [torch.tensor(row["input_ids"]) for row in chosen]
            own = [torch.tensor(row["assistant_masks"]).bool() for row in chosen]
            labels = [one.where(mask, -100) for one, mask in zip(ids, own, strict=True)]
            # They are padded on the right, so no attention mask is needed.
            yield {
                "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
                "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            }

    return tiny_model.warm_up(model, batches(), steps, learning_rate=1e-2)
