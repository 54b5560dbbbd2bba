"""Hints from the task's verifier: what is wrong with the reply that the policy has just given."""

from collections.abc import Callable, Iterable
from typing import Any

from composer_plugins.columns import HINT, Prompt, Row
from composer_plugins.recipes.smollm.tasks import Task
from composer_plugins.teacher.subject import Subject

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
