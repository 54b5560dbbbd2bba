"""From a row's messages to token ids, as verl's agent loops make them, and the longest sequence that fits."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins import columns
from composer_plugins.adapters.verl_plugin.upstream import has_adapter, token_limits
from composer_plugins.errors import DataError

Messages = list[dict[str, Any]]


class Prompts:
    """The trainer's tokenizer with its chat template, and the longest sequence that its models take."""

    def __init__(self, trainer: Any) -> None:
        self.tokenizer = trainer.tokenizer
        self.options = dict(trainer.config.data.get("apply_chat_template_kwargs", None) or {})
        self.template = trainer.channels.config.teacher_prompt_template
        own_reference = trainer.channels.uses_reference and not has_adapter(trainer.config)
        self.limit = min([trainer.positions, *token_limits(trainer.config, own_reference=own_reference)])
        self.cache: dict[str, list[int]] = {}  # a prompt is sampled many times

    def ids(self, messages: columns.Prompt, **options: Any) -> list[int]:
        """Return the token ids of messages, by default up to where the assistant's turn begins."""
        options = {"add_generation_prompt": True} | options
        if (key := repr((messages, options))) not in self.cache:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **options, **self.options
            )
            self.cache[key] = rendered["input_ids"]
        return self.cache[key]

    def hinted(self, messages: Messages, hint: str | None, *, prompt: Tensor, response: Tensor) -> Tensor:
        """Return the teacher's prompt. Raises unless `prompt`, the policy's, is the same without the hint."""
        if self.ids(messages) != prompt.tolist():
            problem = "a rollout's prompt is not its row's prompt in the chat template, so the place of the "
            problem += "hint is not known (an agent loop, a tool or a truncation changed it)"
            remedy = "set data.filter_overlong_prompts=True, raise data.max_prompt_length, "
            raise DataError("prompt", problem, f"{remedy}or set hint_weight=0")
        ids = self.ids(columns.hinted_prompt(messages, hint, self.template))
        self.check_length(len(ids) + len(response), "prompt + hint + response")
        return torch.tensor(ids)

    def completion(
        self, messages: Messages, side: columns.Completion, row: columns.Row
    ) -> tuple[Tensor, Tensor]:
        """Return the token ids of the prompt, and of a completion up to where the template ends a turn.

        The prompt shows the tools of the row.
        """
        messages, answer = columns.template_messages(messages), columns.completion_messages(side)
        tools = columns.tools_of(row, messages)
        options = {"tools": tools} if tools else {}
        prompt = self.ids(messages, **options)
        whole = self.ids([*messages, *answer], add_generation_prompt=False, **options)
        completion = columns.after_prompt(whole, prompt)
        columns.check_calls_are_shown(answer, self.tokenizer.decode(completion))
        self.check_length(len(whole), "prompt + completion")
        return torch.tensor(prompt), torch.tensor(completion)

    def check_length(self, length: int, what: str) -> None:
        """Raise DataError for a sequence longer than the model's positions or a GPU's tokens."""
        if length > self.limit:
            problem = f"{length} tokens are more than the {self.limit} that the models take"
            remedy = "shorten it, drop the row, or raise ppo_max_token_len_per_gpu and "
            remedy += "log_prob_max_token_len_per_gpu if the limit is theirs and not the model's"
            raise DataError(what, problem, remedy)
