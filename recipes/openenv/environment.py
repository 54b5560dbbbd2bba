"""The OpenEnv environment: an action is the source of the deleted function, the tests give the reward."""

from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from composer_plugins.recipes.openenv.tasks import Task, make_tasks
from composer_plugins.recipes.openenv.verifier import verify

ATTEMPTS = 2
DISCOUNT = 0.5  # of the reward, for each attempt that failed before
NO_TASK = "no task has been chosen: call reset first"


class WriteFunction(Action):
    """Write the deleted function."""

    source: str = Field(description="The whole function in Python.")


class Tested(Observation):
    """What the agent reads, and what the tests said about the last attempt."""

    text: str = Field(description="What the agent reads: the task, or the result of an attempt.")
    error: str = Field(default="", description="The first failing test; empty if there is none.")
    passed: int = Field(default=0, description="The number of tests that pass.")
    total: int = Field(default=0, description="The number of tests.")


class DeletedFunction(Environment[WriteFunction, Tested, State]):
    """An episode: the agent sees a module without one function, and has ATTEMPTS attempts to write it.

    The last attempt is rewarded with the fraction of tests that pass, halved for each failed attempt before
    it. An attempt is the last one if all tests pass. `reset(seed=..., task=...)` chooses the repositories and
    the deleted function.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._task: Task | None = None
        self._failed = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task: int = 0, **_: Any
    ) -> Tested:
        """Begin an episode with the task of this number."""
        tasks = make_tasks(seed or 0)
        self._task, self._failed = tasks[task % len(tasks)], 0
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Tested(text=self._task.prompt, reward=0.0, done=False)

    def step(self, action: WriteFunction, timeout_s: float | None = None, **_: Any) -> Tested:
        """Run the tests on a function."""
        if self._task is None:
            return Tested(text=NO_TASK, reward=0.0, done=True)
        self._state.step_count += 1
        verdict = verify(self._task, action.source)
        reward = verdict.passed / verdict.total * DISCOUNT**self._failed
        self._failed += bool(verdict.error)
        done = not verdict.error or self._failed >= ATTEMPTS
        return Tested(
            text=verdict.error or f"all {verdict.total} tests pass",
            error=verdict.error,
            passed=verdict.passed,
            total=verdict.total,
            reward=reward if done else 0.0,
            done=done,
        )

    @property
    def state(self) -> State:
        """The episode's id and the number of its steps."""
        return self._state


def make_app(sessions: int) -> FastAPI:
    """The server of the environment for at most `sessions` episodes at a time."""
    return create_fastapi_app(DeletedFunction, WriteFunction, Tested, max_concurrent_envs=sessions)
