"""Hints from the task's verifier: what is wrong with the reply that the policy has just given."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from composer_plugins.columns import HINT, Prompt, Row
from composer_plugins.recipes.smollm.tasks import VERIFIER, WORKED, Task
from composer_plugins.teacher.subject import Subject, TokenIds

RolloutFunc = Callable[[list[Prompt], Any], dict[str, Any]]


def rollouts(subject: Subject, task: Task) -> RolloutFunc:
    """Return a rollout_func for TRL, which samples replies and returns the feedback on each as its hint.

    The adapter reads a hint that a rollout_func returns as it reads the column of the data set.
    """
    rows = {asked(row["prompt"]): row for row in subject.rows}

    def rollout(prompts: list[Prompt], trainer: Any) -> dict[str, Any]:
        ids = subject.encode(prompts)
        completions = subject.completions(ids, sampled=True)
        replies = zip(prompts, subject.texts(completions), strict=True)
        hints = [task.feedback(reply, dict(rows[asked(prompt)])) for prompt, reply in replies]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, HINT: hints}

    return rollout


def asked(prompt: Any) -> str:
    """The question of a prompt."""
    return str(prompt[-1]["content"])


def without_hints(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with None as their hints: the adapter requires the column, and the rollouts fill it."""
    return [{**row, HINT: None} for row in rows]


@dataclass(frozen=True)
class WrongReplies(Subject):
    """A subject of which each row has a wrong reply of the policy, and a hint that may be about this reply.

    The policy's sampled completions are these replies, so `teacher.measure` compares policy and teacher on
    them.
    """

    replies: Sequence[TokenIds] = ()

    def completions(self, prompts: Sequence[TokenIds], *, sampled: bool) -> list[TokenIds]:
        """The replies, if the rows' own prompts are given; otherwise completions that are drawn now."""
        if sampled and [*prompts] == self.encode([row["prompt"] for row in self.rows]):
            return [*self.replies]
        return super().completions(prompts, sampled=sampled)


def wrong_replies(subject: Subject, task: Task) -> dict[str, WrongReplies]:
    """Sample a reply to each question; return those that are wrong with each kind of hint, by its name."""
    drawn = subject.completions(subject.encode([row["prompt"] for row in subject.rows]), sampled=True)
    both = zip(subject.rows, drawn, subject.texts(drawn), strict=True)
    found = [(row, ids, hint) for row, ids, text in both if (hint := task.feedback(text, dict(row)))]
    options = {one.name: getattr(subject, one.name) for one in fields(Subject)}
    replies = [ids for _, ids, _ in found]
    worked = WrongReplies(**{**options, "rows": [row for row, _, _ in found], "samples": 1}, replies=replies)
    own = [{**row, HINT: hint} for row, _, hint in found]
    return {WORKED: worked, VERIFIER: replace(worked, rows=own)}
