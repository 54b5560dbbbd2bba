"""The OpenEnv server: episodes, sessions, and how it starts and ends."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from openenv import GenericEnvClient

from composer_plugins.recipes.openenv.tasks import make_tasks

COMMAND = [sys.executable, "-m", "composer_plugins.recipes.openenv"]
WRONG = "def {0.function}(a, b):\n    return -99"
TASKS = make_tasks(0)


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with GenericEnvClient(base_url=url).sync() as connected:
        yield connected


def test_a_right_first_attempt_is_rewarded_in_full(client: Any) -> None:
    task = make_tasks(3)[5]
    start = client.reset(seed=3, task=5)
    assert start.observation["text"] == task.prompt and not start.done
    result = client.step({"source": task.solution})
    assert (result.reward, result.done, result.observation["error"]) == (1.0, True, "")
    assert result.observation["text"] == "all 3 tests pass"


def test_episodes_at_the_same_time_do_not_mix(url: str) -> None:
    def episode(number: int) -> tuple[float, str]:
        with GenericEnvClient(base_url=url).sync() as own:
            own.reset(seed=0, task=number)
            wrong = own.step({"source": WRONG.format(TASKS[number])})
            return own.step({"source": TASKS[number].solution}).reward, wrong.observation["error"]

    with ThreadPoolExecutor(7) as pool:
        results = list(pool.map(episode, range(7)))
    assert [reward for reward, _ in results] == [0.5] * 7
    for task, (_, error) in zip(TASKS, results, strict=False):
        assert error.startswith(f"{task.call(task.cases[0])} should be {task.cases[0].expected},")


def test_the_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import time\nfrom composer_plugins.recipes.openenv.server import serving\n"
        "with serving(1) as url:\n    print(url, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline().startswith("http://127.0.0.1:")
            (server,) = psutil.Process(parent.pid).children(recursive=True)
        finally:
            parent.kill()
        server.wait(30)


def test_errors_of_the_command_line_are_one_sentence(url: str) -> None:
    port = url.rpartition(":")[2]
    done = subprocess.run([*COMMAND, "serve", "--port", port], timeout=120, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith(f"error: --port: port {port} cannot be used") and done.stderr.count("\n") == 1
    )
