"""The server that over_http starts: it is stopped in every case, and serves the real model."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.smollm import server
from composer_plugins.recipes.smollm.endpoint import Endpoint
from composer_plugins.recipes.smollm.replies import Reply, ask
from composer_plugins.recipes.smollm.server import free_port, running, served_model
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task

# A program that answers every GET with the status of its second argument.
PROGRAM = """
import http.server, signal, sys
print("listening", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers()
if sys.argv[3:]: signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def program(port: int, *words: str) -> list[str]:
    """The command of a server without a model."""
    return [sys.executable, "-c", PROGRAM, str(port), *words]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("--url", "it fails", "start again"), None])
def test_the_server_is_stopped_however_the_block_ends(error: BaseException | None, tmp_path: Path) -> None:
    port, before = free_port(), signal.getsignal(signal.SIGTERM)
    try:
        with running(program(port, "200"), tmp_path, port) as process:
            assert process.poll() is None
            if error is not None:
                raise error
    except (KeyboardInterrupt, ConfigError):
        assert error is not None
    assert process.returncode == -signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before


def test_sigterm_stops_the_server_too(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(SystemExit) as ended, running(program(port, "200"), tmp_path, port) as process:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert ended.value.code == 128 + signal.SIGTERM and process.returncode is not None


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    port = free_port()
    with running(program(port, "200", "ignores SIGTERM"), tmp_path, port) as process:
        pass
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('one'); sys.exit('no such model')"]
    said = r"--url: .* ended with status 1 \(no such model\); start a server"
    with pytest.raises(ConfigError, match=said), running(command, tmp_path, free_port()):
        raise AssertionError("the block began")


def test_a_server_that_never_answers_is_an_error_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, port = list[subprocess.Popen[bytes]](), free_port()

    class Kept(subprocess.Popen[bytes]):
        """A process that the test can look at."""

        def __init__(self, *given: object, **options: object) -> None:
            super().__init__(*given, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    made = running(program(port, "503"), tmp_path, port, seconds=2)
    with pytest.raises(ConfigError, match="does not answer after 2 seconds"), made:
        raise AssertionError("the block began")
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_transformers_serve_samples_by_the_seed_and_decodes_greedily() -> None:
    task = make_task(ARITHMETIC)
    with served_model() as url:
        endpoint = Endpoint(url, server.NAME, max_tokens=12)

        def replies(seed: int) -> list[Reply]:
            return asyncio.run(ask(endpoint, task, task.rows[:1], seed, lambda: None))

        (hinted, plain), (hinted_again, other), (_, plain_again) = replies(0), replies(1), replies(0)
    assert hinted == hinted_again and hinted.reward == 1
    assert plain == plain_again and plain.message != other.message
