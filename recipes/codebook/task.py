"""The codebook task: learn which two digits belong to each letter.

The prompt is ``b?``, the right completion ``47`` and an end of sequence. The codebook is drawn at random.
So a model can learn it only from the signals of the three channels:

- reward: the fraction of right digits in an answer that the model has sampled;
- hint: ``[47]`` after the prompt. Before training the model can copy a hint, and knows no answer without it;
- replay: pairs (better, worse) of answers by simulated teachers of different skill, ordered by the
  verifier that gives the reward.

The model is a Qwen3 of 77 thousand parameters, made from scratch: nothing is downloaded.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from composer_plugins.recipes import tiny_model

KEYS = "abcdefghijklmnop"
DIGITS = "0123456789"
ANSWER_LENGTH = 2
COMPLETION_LENGTH = ANSWER_LENGTH + 1  # the digits and the end of sequence
PROMPT_WITH_HINT = "{prompt}{privileged_context}"

SPECIAL = ["<pad>", "<eos>", "<unk>"]
VOCABULARY = [*SPECIAL, *DIGITS, *"abcdefghijklmnopqrstuvwxyz", *"?[]"]
EOS_ID = VOCABULARY.index("<eos>")

# How often each simulated teacher gets a digit right by knowing it; otherwise it guesses.
TEACHER_SKILLS = (0.95, 0.7, 0.3, 0.0, 0.0)
REPLAYS = 8  # how often the teachers answer each prompt


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    words = models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts spaces between the digits
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised steps that teach the format and how to copy a hint, and nothing about any codebook.

    The answers are drawn anew for every row, so without a hint the model can only learn to guess.
    """
    draw, steps, batch_size = random.Random(seed), 300, 64
    hinted_rows = int(0.8 * batch_size)  # with fewer, some seeds do not learn to copy

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(steps):
            texts = []
            for row in range(batch_size):
                key, answer = draw.choice(KEYS), "".join(draw.choices(DIGITS, k=ANSWER_LENGTH))
                hint = f"[{answer}]" if row < hinted_rows else ""
                texts.append(f"{key}?{hint}{answer}<eos>")
            batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            labels = batch["input_ids"].clone()
            labels[:, :-COMPLETION_LENGTH] = -100
            yield {**batch, "labels": labels}

    tiny_model.warm_up(model, batches(), steps, learning_rate=3e-3)


def score(text: str, answer: str) -> float:
    """The verifier: the fraction of digits that are right at their place; 0 for a wrong length."""
    if len(text) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(text, answer, strict=True)) / len(answer)


def codebook_reward(
    completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """The verifier as a reward function of TRL's. A completion without an end of sequence scores 0.

    TRL strips the end of sequence from the text, so it is looked for in the token ids.
    """
    return [
        score(text, right) if ids[-1] == EOS_ID else 0.0
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def codebook_rows(seed: int) -> list[dict[str, Any]]:
    """Rows with a prompt, a hint, pairs of replayed traces, and the answer for the reward.

    Each letter has REPLAYS rows, which differ in what the teachers answered.
    """
    draw = random.Random(seed)
    codebook = {key: "".join(draw.choices(DIGITS, k=ANSWER_LENGTH)) for key in KEYS}
    return [
        {
            "prompt": f"{key}?",
            "privileged_context": f"[{answer}]",
            **replayed_pairs(answer, draw),
            "answer": answer,
        }
        for _ in range(REPLAYS)
        for key, answer in codebook.items()
    ]


def replayed_pairs(answer: str, draw: random.Random) -> dict[str, list[Any] | None]:
    """Let every teacher answer once; pair the best trace with each that scores lower.

    ``n_teachers_agreeing`` counts the teachers that gave the best trace. If no teacher knew the answer,
    the best trace is wrong too.
    """
    traces = [
        "".join(c if draw.random() < skill else draw.choice(DIGITS) for c in answer)
        for skill in TEACHER_SKILLS
    ]
    best = max(traces, key=lambda trace: (score(trace, answer), traces.count(trace)))
    worse = [trace for trace in dict.fromkeys(traces) if score(trace, answer) < score(best, answer)]
    if not worse:  # all teachers did equally well: this row has no pair
        return {"chosen": None, "rejected": None, "n_teachers_agreeing": None}
    return {
        "chosen": [best] * len(worse),
        "rejected": worse,
        "n_teachers_agreeing": [traces.count(best)] * len(worse),
    }


@torch.no_grad()
def greedy_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]
) -> float:
    """The mean verifier score of the most likely answer to each prompt, without a hint."""
    answer_to = {row["prompt"]: row["answer"] for row in rows}
    batch = tokenizer(list(answer_to), return_tensors="pt", padding=True, add_special_tokens=False).to(
        model.device
    )
    was_training = model.training
    model.eval()
    ids = model.generate(**batch, max_new_tokens=COMPLETION_LENGTH, do_sample=False)
    model.train(was_training)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].size(1) :], skip_special_tokens=True)
    scores = [score(text, answer) for text, answer in zip(texts, answer_to.values(), strict=True)]
    return sum(scores) / len(scores)
