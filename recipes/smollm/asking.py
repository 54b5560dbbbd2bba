"""What is asked of the model before and after training: held-out questions, and pairs of replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_plugins.columns import hinted_prompt
from composer_plugins.config import ComposerConfig
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.tasks import WORKED, Row, Task
from composer_plugins.teacher.subject import Subject, chat_encoder

TEMPLATE = ComposerConfig.model_fields["teacher_prompt_template"].default


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    steps: int = 15  # batches of replies
    num_iterations: int = 1  # optimizer steps with each batch
    batch_size: int = 16
    num_generations: int = 4
    max_completion_length: int = 14
    learning_rate: float = 1e-5
    hint_weight: float = 1.0
    replay_weight: float = 0.5
    policy: str = "dapo"
    hints: str = WORKED  # one of HINTS


def subject_of(loaded: Loaded, task: Task, rows: Sequence[Row], settings: Settings) -> Subject:
    """The model with these rows, to draw completions from."""

    def rewards(rows: Any, completions: Any, ids: Any) -> list[float | None]:
        return [*task.reward(completions, [row["answer"] for row in rows])]

    return Subject(
        loaded.model,
        loaded.tokenizer,
        rows,
        chat_encoder(loaded.tokenizer),
        rewards,
        max_new_tokens=settings.max_completion_length,
    )


def accuracy(loaded: Loaded, task: Task, settings: Settings) -> float:
    """The share of held-out questions that the model answers rightly, decoded greedily, without a hint."""
    loaded.model.eval()
    made = subject_of(loaded, task, task.held_out, settings)
    completions = made.completions(made.encode([row["prompt"] for row in task.held_out]), sampled=False)
    return sum(made.rewarded(task.held_out, completions)) / len(task.held_out)


def with_pairs(loaded: Loaded, task: Task, settings: Settings, seed: int) -> list[Row]:
    """The task's rows with pairs of replies: two teachers answer, and the verifier compares them.

    One teacher is the model with the worked answer in its prompt, decoded greedily; the other is the model
    without it, sampled. A row of which the first is right and the second wrong has a pair.
    """
    torch.manual_seed(seed)
    made = subject_of(loaded, task, task.rows, settings)
    shown = [hinted_prompt(row["prompt"], row["privileged_context"], TEMPLATE) for row in task.rows]
    better = made.completions(made.encode(shown), sampled=False)
    worse = made.completions(made.encode([row["prompt"] for row in task.rows]), sampled=True)
    rewards = zip(made.rewarded(task.rows, better), made.rewarded(task.rows, worse), strict=True)
    texts = zip(made.texts(better), made.texts(worse), strict=True)
    rows = []
    for row, (good, bad), (chosen, rejected) in zip(task.rows, rewards, texts, strict=True):
        sides = (chosen.strip(), rejected.strip()) if good > bad and rejected.strip() else (None, None)
        rows.append({**row, "chosen": sides[0], "rejected": sides[1]})
    return rows
