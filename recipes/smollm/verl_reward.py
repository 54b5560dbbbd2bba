"""The verifier as verl's reward function: `reward.custom_reward_function.path` names this file."""

from functools import cache
from typing import Any

from composer_plugins.recipes.smollm.tasks import Task, make_task

task: Any = cache(make_task)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 for a right reply to a question of the task that `data_source` names, otherwise 0."""
    named: Task = task(data_source)
    return named.score(solution_str, ground_truth)
