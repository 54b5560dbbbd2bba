"""A server of the wheel's model on this machine: `transformers serve`, which is stopped in any case."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.smollm.model import load

NAME = "SmolLM2-135M-Instruct"  # of the folder, which is the name of the model in requests
HOST, LOG = "127.0.0.1", "server.log"
START_SECONDS, STOP_SECONDS = 120.0, 10.0
REMEDY = "start a server of your own, and name it by --url"
# The model is in a folder, so no hub is asked, neither for it nor for a newer release of transformers.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}


@contextmanager
def served_model() -> Iterator[str]:
    """Serve the model of the wheel; yield the address of the API.

    Raises ConfigError if the server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, NAME))
        port = free_port()
        with running(serve_command(port), Path(folder), port):
            yield f"http://{HOST}:{port}/v1"


def save(folder: Path) -> None:
    """Write the model of the wheel to a folder.

    `transformers serve` samples only where the model's own settings say so, and then from the whole
    vocabulary only with top_k 0.
    """
    loaded = load(None, "cpu")
    loaded.model.generation_config.update(do_sample=True, top_k=0)
    for part in loaded:
        part.save_pretrained(folder)


def serve_command(port: int) -> list[str]:
    """The command that serves the folder NAME of the current folder."""
    program = [sys.executable, "-m", "transformers.cli.transformers", "serve", NAME]
    return [*program, "--host", HOST, "--port", str(port), "--device", "cpu", "--dtype", "float32"]


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


@contextmanager
def running(
    command: list[str], folder: Path, port: int, seconds: float = START_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a folder until the block ends, by an error, Ctrl-C or SIGTERM too.

    The block begins when the server answers. Raises ConfigError if it does not answer in so many seconds.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        with (folder / LOG).open("wb") as log:
            # In a session of its own Ctrl-C does not reach the server, which would print a traceback.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **OFFLINE},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_it_answers(process, folder / LOG, port, seconds)
            yield process
        finally:
            stop(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until_it_answers(process: subprocess.Popen[bytes], log: Path, port: int, seconds: float) -> None:
    """Return when GET /health has the status 200; raise ConfigError if the server ends or is too slow."""
    until = time.monotonic() + seconds
    while not is_healthy(port):
        said = log.read_text(errors="replace").strip().rpartition("\n")[2] or "it printed nothing"
        if process.poll() is not None:
            problem = f"`transformers serve` ended with status {process.returncode} ({said})"
            raise ConfigError("--url", problem, REMEDY)
        if time.monotonic() > until:
            problem = f"`transformers serve` does not answer after {seconds:g} seconds ({said})"
            raise ConfigError("--url", problem, REMEDY)
        time.sleep(0.1)


def is_healthy(port: int) -> bool:
    """Whether the server says that it can answer."""
    with suppress(OSError, HTTPException), closing(HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server: it may finish a request, and is killed if that takes too long."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # also at a second Ctrl-C; nothing happens to a process that has ended
        process.kill()
        process.wait()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
