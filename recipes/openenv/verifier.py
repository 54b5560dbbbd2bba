"""The verifier: does a function that was written again pass its tests?

The function runs in a process of its own, which ends after some seconds. That is no sandbox: the code that
the model writes has the rights of the server. Run the server in a container if you do not trust the model.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_plugins.recipes.openenv.tasks import Task
from composer_plugins.recipes.shared import cut

RUNNER = Path(__file__).with_name("runner.py").read_text()
SECONDS = 10.0  # then the process is ended
LONGEST_PROBLEM = 200  # characters of an error that the code itself may have written


@dataclass(frozen=True)
class Verdict:
    """How many tests pass; `error` is a sentence about the first that fails, and is empty if all pass."""

    passed: int
    total: int
    error: str


@lru_cache(maxsize=10_000)  # a rollout is often like another
def verify(task: Task, source: str, seconds: float = SECONDS) -> Verdict:
    """Run the task's tests on `source`, the function as an agent wrote it.

    The expected values stay in this process. So code that prints a report or ends its process early cannot
    pass a test without returning the right value.
    """
    outcomes = run(task, f"{task.source}\n\n{source}", seconds)
    passed, errors = 0, []
    for case, outcome in zip(task.cases, outcomes, strict=True):
        if "error" not in outcome and outcome.get("value") == case.expected:
            passed += 1
        else:
            errors.append(f"{task.call(case)} should be {case.expected}, but {problem_of(outcome)}")
    return Verdict(passed, len(task.cases), errors[0] if errors else "")


def run(task: Task, source: str, seconds: float) -> list[dict[str, Any]]:
    """Execute a module in a process, call the task's function for each test, and return the outcomes."""
    job = {"source": source, "function": task.function, "calls": [case.arguments for case in task.cases]}
    rest = {"error": "its process ended before it returned"}
    with tempfile.TemporaryFile() as report:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            rest = {"error": f"it was ended after {seconds:g} seconds"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the code has started, too
            process.wait()
        report.seek(0)
        try:
            outcomes = [dict(json.loads(line)) for line in report.read().splitlines()]
        except (ValueError, TypeError, RecursionError):  # the code wrote into it
            outcomes, rest = [], {"error": "its report cannot be read"}
    return [*outcomes, *[rest] * len(task.cases)][: len(task.cases)]


def problem_of(outcome: dict[str, Any]) -> str:
    """What happened, in one short line. The agent's code may have written it, and it becomes the hint."""
    text = str(outcome.get("error") or f"it is {outcome.get('value')!r}")
    text = text.encode(errors="backslashreplace").decode()  # JSON has no half of a surrogate pair
    return cut(" ".join("".join(one if one.isprintable() else " " for one in text).split()), LONGEST_PROBLEM)
