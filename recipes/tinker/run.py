"""One run: a letter of the codebook task over HTTP, with the channels of a loss on or off."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from tinker import ServiceClient, types

from composer_plugins.adapters.tinker_loss import (
    add_advantages,
    add_ref_logprobs,
    add_teacher_logprobs,
    loss_fn,
    mark_pairs,
)
from composer_plugins.adapters.tinker_loss.skyrl_server import forward_backward_on_skyrl
from composer_plugins.recipes.codebook import task

LETTERS = task.KEYS[:1]  # LoRA on a model that has not learned to tell the letters apart learns one answer
COMPLETIONS, PAIRS, RANK, LEARNING_RATE = 64, 8, 16, 0.002
# Each channel's options of `loss_fn`. The adapter divides the policy by the completions of the step.
CHANNELS: dict[str, dict[str, Any]] = {
    "rl": {"policy": "grpo"},
    "hint": {"hint_weight": 0.3, "hint_estimator": "score"},
    "replay": {"replay_weight": 0.5, "replay_loss": "dpo", "replay_params": {"beta": 0.5}},
}


def datum(prompt: Sequence[int], completion: Sequence[int], logprobs: Sequence[float] | None = None) -> Any:
    """A datum as tinker-cookbook makes it: its targets are the tokens shifted by one; the mask marks the
    completion's."""
    start, whole = len(prompt) - 1, [*prompt, *completion]
    known = [0.0] * len(completion) if logprobs is None else logprobs
    inputs = {
        "target_tokens": torch.tensor(whole[1:]),
        "mask": torch.tensor([0.0] * start + [1.0] * len(completion)),
        "logprobs": torch.tensor([0.0] * start + list(known)),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


class Trainer:
    """A client of the server, the codebook, and the loss of some channels."""

    def __init__(self, url: str, model: str, channels: Sequence[str], *, seed: int) -> None:
        self.service = ServiceClient(base_url=url, api_key="tml-local")
        self.client = self.service.create_lora_training_client(base_model=model, rank=RANK, seed=seed)
        self.base = self.service.create_sampling_client(base_model=model)  # the teacher, and DPO's reference
        self.tokenizer = task.make_tokenizer()
        self.rows = [row for row in task.codebook_rows(seed) if row["prompt"][0] in LETTERS]
        self.channels, self.seed, self.draw = channels, seed, random.Random(seed)
        chosen = [CHANNELS[one] for one in channels]
        options = {name: value for one in chosen for name, value in one.items()}
        self.loss = loss_fn(**options, policy_weight=float("rl" in channels))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def rollouts(self, step: int) -> tuple[list[Any], list[float], list[dict[str, Any]]]:
        """The data of a step's completions, their rewards, and the row of each."""
        sampler = self.client.save_weights_and_get_sampling_client()
        prompts = self.rows[: len(LETTERS)]
        parameters = types.SamplingParams(
            max_tokens=task.COMPLETION_LENGTH, temperature=1.0, stop=[task.EOS_ID], seed=self.seed + step
        )
        asked = [
            sampler.sample(types.ModelInput.from_ints(self.ids(row["prompt"])), COMPLETIONS, parameters)
            for row in prompts
        ]
        data, rewards, of = [], list[float](), []
        for row, future in zip(prompts, asked, strict=True):
            for sequence in future.result().sequences:
                data.append(datum(self.ids(row["prompt"]), sequence.tokens, sequence.logprobs))
                text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
                rewards += task.codebook_reward([text], [sequence.tokens], [row["answer"]])
                of.append(row)
        return data, rewards, of

    def pairs(self) -> list[Any]:
        """Pairs of a step, drawn from the rows, with the reference's log-probabilities and their weights."""
        having = [row for row in self.rows if row["chosen"]]
        rows = self.draw.choices(having, k=PAIRS)
        sides: dict[str, list[Any]] = {
            side: [datum(self.ids(row["prompt"]), [*self.ids(row[side][0]), task.EOS_ID]) for row in rows]
            for side in ("chosen", "rejected")
        }
        scored = {side: add_ref_logprobs(data, self.base) for side, data in sides.items()}
        return mark_pairs(**scored, weights=[float(row["n_teachers_agreeing"][0]) for row in rows])

    def step(self, number: int) -> tuple[float, dict[str, float]]:
        """One step; the mean reward of its completions, and the metrics of the loss."""
        data, rewards, rows = self.rollouts(number)
        data = add_advantages(data, rewards, [row["prompt"] for row in rows])
        if "hint" in self.channels:
            hinted = [self.ids(row["prompt"] + row["privileged_context"]) for row in rows]
            data = add_teacher_logprobs(data, self.base, hinted)
        if "replay" in self.channels:
            data += self.pairs()
        # The server falsifies the gradient of the SDK's own forward_backward_custom.
        metrics = forward_backward_on_skyrl(self.client, data, self.loss, backend="jax")
        step = self.client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
        return sum(rewards) / len(rewards), metrics | (step.metrics or {})
