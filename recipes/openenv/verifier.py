"""The verifier: does a function that was written again pass its tests?"""

from dataclasses import dataclass

from composer_plugins.recipes.openenv.sandbox import Outcome, Sandbox
from composer_plugins.recipes.openenv.tasks import Task
from composer_plugins.recipes.shared import cut

LONGEST_PROBLEM = 200  # characters of an error that the code itself may have written


@dataclass(frozen=True)
class Verdict:
    """How many tests pass; `error` is a sentence about the first that fails, and is empty if all pass."""

    passed: int
    total: int
    error: str
    unsure: bool = False  # whether the machine may be at fault: too slow, or without room for a process


def verify(task: Task, source: str, sandbox: Sandbox) -> Verdict:
    """Run the task's tests on `source`, the function as an agent wrote it.

    The expected values stay in this process. So code that prints a report or ends its process early cannot
    pass a test without returning the right value.
    """
    calls = [(task.function, case.arguments) for case in task.cases]
    outcomes = sandbox.run(f"{task.source}\n\n{source}", calls)
    passed, errors = 0, []
    for case, outcome in zip(task.cases, outcomes, strict=True):
        if not outcome.error and outcome.value == case.expected:
            passed += 1
        else:
            errors.append(f"{task.call(case)} should be {case.expected}, but {_problem(outcome)}")
    unsure = any(outcome.unsure for outcome in outcomes)
    return Verdict(passed, len(task.cases), errors[0] if errors else "", unsure)


def _problem(outcome: Outcome) -> str:
    """What happened, in one short line. The agent's code may have written it, and it becomes the hint."""
    text = outcome.error or f"it is {outcome.value!r}"
    text = text.encode(errors="backslashreplace").decode()  # JSON has no half of a surrogate pair
    return cut(" ".join("".join(one if one.isprintable() else " " for one in text).split()), LONGEST_PROBLEM)
