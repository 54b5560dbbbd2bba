"""The tool for TRL's environment_factory: rewards, hints, and a server that is lost; and the tiny policy.

The tokens that such a hint is about: adapters/trl_mixin/test_environment_hints.py.
"""

import random
from collections.abc import Iterator

import psutil
import pytest

from composer_plugins.errors import DataError
from composer_plugins.recipes.openenv import policy
from composer_plugins.recipes.openenv.server import serving
from composer_plugins.recipes.openenv.tasks import EXPRESSIONS, Task, function_source, make_tasks
from composer_plugins.recipes.openenv.trl_tools import FINISHED, DeletedFunctionTools, environments

TASKS = make_tasks(0)


def wrong(task: Task) -> str:
    """A function that fails the first test."""
    others = [one for one in EXPRESSIONS if function_source(task.function, one) != task.solution]
    return function_source(task.function, others[0])


@pytest.fixture
def tools(url: str) -> Iterator[DeletedFunctionTools]:
    with environments(url) as factory:
        yield factory()


def test_the_first_failing_test_is_the_hint_of_the_first_turn(tools: DeletedFunctionTools) -> None:
    assert tools.reset(seed=0, task=4, prompt=[], another_column=1) == TASKS[4].prompt
    assert (tools.privileged_context, tools.hint_turn, tools.get_reward()) == (None, None, 0.0)
    said = tools.write_function(wrong(TASKS[4]))
    assert said == tools.privileged_context and "should be" in said
    assert tools.hint_turn == 0
    tools.write_function(TASKS[4].solution)
    assert tools.get_reward() == 0.5 and tools.privileged_context == said
    assert tools.write_function(TASKS[4].solution) == FINISHED and tools.get_reward() == 0.5
    tools.reset(seed=0, task=4)
    tools.write_function(TASKS[4].solution)
    assert (tools.privileged_context, tools.hint_turn, tools.get_reward()) == (None, None, 1.0)


def test_a_server_that_is_killed_ends_the_training() -> None:
    """TRL turns the exception of the tool into text for the model, so the reward and the reset raise it."""
    others = set(psutil.Process().children())
    with serving(1) as address, environments(address) as factory:
        (server,) = set(psutil.Process().children()) - others
        tools = factory()
        tools.reset(seed=0, task=4)
        server.kill()
        server.wait()
        with pytest.raises(Exception, match="close frame|[Cc]onnect") as first:
            tools.write_function(TASKS[4].solution)
        said = rf"server: {address} does not answer as it should \({type(first.value).__name__}: "
        with pytest.raises(DataError, match=said):
            tools.get_reward()
        with pytest.raises(DataError, match=f"server: {address} does not answer as it should"):
            tools.reset(seed=0, task=4)


def test_a_server_that_was_started_again_ends_the_training(url: str) -> None:
    """It has no episode for this connection, and would reward every attempt with 0."""
    with environments(url) as factory:
        tools = factory()
        with pytest.raises(ConnectionError, match="it was started again"):
            tools.write_function(TASKS[4].solution)
        with pytest.raises(DataError, match="ConnectionError: it was started again"):
            tools.get_reward()


def test_the_warm_up_says_nothing_about_a_task() -> None:
    """Given a name, every expression is as likely."""
    draw = random.Random(0)
    right: dict[str, list[str]] = {}
    for _ in range(4000):
        messages = policy.conversation(draw, hinted=True)
        source = messages[1]["tool_calls"][0]["function"]["arguments"]["source"]
        name = source.removeprefix("def ").split("(")[0]
        right.setdefault(name, []).append(source)
    for sources in right.values():
        counts = [sources.count(one) for one in sorted(set(sources))]
        assert len(counts) == len(EXPRESSIONS) and max(counts) < 2 * min(counts)
