"""The bridge to TRL: an instance is one rollout's episode, its methods are the tools.

`GRPOTrainer(environment_factory=...)` takes a class with `reset`, tool methods and `get_reward`. After the
rollout `hint_source="environment"` reads two attributes: `privileged_context`, the hint, and `hint_turn`, the
turn that it is about. Here the hint is the first failing test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openenv import GenericEnvClient

from composer_plugins.errors import DataError, in_a_line
from composer_plugins.recipes.openenv.environment import NO_TASK, WriteFunction

FINISHED = "the episode is over"


class DeletedFunctionTools:
    """One episode at a time on the server at `url`. TRL makes every public method but two a tool."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url, GenericEnvClient(base_url=url).sync()
        self._start()

    def _start(self) -> None:
        self.privileged_context: str | None = None
        self.hint_turn: int | None = None
        self._reward = 0.0
        self._done = False
        self._lost: Exception | None = None

    def reset(self, seed: int = 0, task: int = 0, **_: Any) -> str:
        """Begin an episode. TRL passes the row's columns, and appends what this returns to the prompt."""
        self._start()
        try:
            return str(self._client.reset(seed=seed, task=task).observation["text"])
        except Exception as error:  # of the client: a closed connection, a timeout, an error of the server
            raise self._error(error) from error

    def get_reward(self) -> float:
        """The reward of the episode: the sum over its steps; DataError if the server was lost in between."""
        if self._lost is not None:
            raise self._error(self._lost) from self._lost
        return self._reward

    def _error(self, error: Exception) -> DataError:
        problem = f"{self._url} does not answer as it should ({in_a_line(error)})"
        return DataError("server", problem, "look at what it printed, start it again, and train again")

    def write_function(self, source: str) -> str:
        """Write the function and run its tests.

        Args:
            source: The whole function in Python.

        Returns:
            The first failing test, or that all pass.
        """
        if self._done:
            return FINISHED
        try:
            result = self._client.step(WriteFunction(source=source).model_dump())
            if result.observation["text"] == NO_TASK:
                raise ConnectionError("it was started again, and does not know the episode")
        except Exception as error:
            # TRL turns an exception of a tool into text for the model, and trains on. get_reward raises it.
            self._lost = self._lost or error
            raise
        self._reward += float(result.reward or 0.0)
        self._done = bool(result.done)
        if result.observation["error"] and self.privileged_context is None:
            self.privileged_context = result.observation["error"]
            self.hint_turn = 0  # a failed first attempt is of the first turn, and only it is the hint
        return str(result.observation["text"])


@contextmanager
def environments(url: str) -> Iterator[Any]:
    """An `environment_factory` for GRPOTrainer. The connections are closed with the block."""
    made: list[DeletedFunctionTools] = []

    def make() -> DeletedFunctionTools:
        made.append(DeletedFunctionTools(url))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one._client.close()
