"""From the data set's messages to token ids, as verl's agent loops make them, and the lengths that fit."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.verl_parts.run import has_adapter
from composer_plugins.columns import Prompt, Side, after_prompt, answer_of, hinted_prompt
from composer_plugins.errors import DataError

Messages = list[dict[str, Any]]


class Prompts:
    """The trainer's tokenizer with its chat template, and the longest sequence that its model takes."""

    def __init__(self, trainer: Any) -> None:
        self.tokenizer = trainer.tokenizer
        self.options = dict(trainer.config.data.get("apply_chat_template_kwargs", None) or {})
        self.template = trainer.channels.config.teacher_prompt_template
        self.limit = longest(trainer)
        self.known: dict[str, list[int]] = {}  # a prompt is sampled many times

    def ids(self, messages: Prompt, **options: Any) -> list[int]:
        """Token ids of messages, by default up to where the assistant speaks."""
        options = {"add_generation_prompt": True} | options
        if (key := repr((messages, options))) not in self.known:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **options, **self.options
            )
            self.known[key] = rendered["input_ids"]
        return self.known[key]

    def hinted(self, messages: Messages, hint: str | None, *, like: Tensor, response: Tensor) -> Tensor:
        """The teacher's prompt; `like` is the policy's, which must be the same but for the hint."""
        if self.ids(messages) != like.tolist():
            raise DataError(
                "a rollout's prompt is not its row's prompt in the chat template: an agent loop, a tool or a "
                "truncation changed it, and where the hint goes cannot be told. Set hint_weight=0, or "
                "data.truncation=error"
            )
        ids = self.ids(hinted_prompt(messages, hint, self.template))
        self.check(len(ids) + len(response), "prompt + hint + response")
        return torch.tensor(ids)

    def completion(self, messages: Messages, side: Side) -> tuple[Tensor, Tensor]:
        """Token ids of the prompt and of a completion of it, to where the template ends a turn."""
        answer, prompt = answer_of(side), self.ids(messages)
        whole = self.ids([*messages, *answer], add_generation_prompt=False)
        completion = after_prompt(whole, prompt)
        self.check(len(whole), "prompt + completion")
        return torch.tensor(prompt), torch.tensor(completion)

    def check(self, length: int, what: str) -> None:
        """Raise DataError for a sequence that the engine cannot take."""
        if length > self.limit:
            raise DataError(
                f"{what} are {length} tokens, and the engine takes {self.limit}: shorten them, or drop "
                "the row; ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu raise the limit, if "
                "it is theirs and not the model's"
            )


def longest(trainer: Any) -> int:
    """The model's positions, and with dynamic batches what a GPU takes at once."""
    config = trainer.config.actor_rollout_ref
    limits = [trainer.positions]
    if config.actor.use_dynamic_bsz:
        limits += [config.actor.ppo_max_token_len_per_gpu, config.rollout.log_prob_max_token_len_per_gpu]
    asks = trainer.channels.asks_reference and not has_adapter(trainer.config)
    if asks and config.ref.log_prob_use_dynamic_bsz:
        limits.append(config.ref.log_prob_max_token_len_per_gpu)
    return min(limits)
