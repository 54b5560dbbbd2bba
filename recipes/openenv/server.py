"""The environment's server: `serve` runs it in this process, `serving` in a process of its own."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.openenv.sandbox import OPTION, Sandbox

READY = "the environment is served at "
SECONDS_TO_STOP = 10


def serve(sandbox: Sandbox, sessions: int, port: int, *, until_stdin_closes: bool) -> None:
    """Serve on loopback until a signal; port 0 lets the system choose one. The address is printed."""
    sandbox.check()
    import uvicorn

    from composer_plugins.recipes.openenv.environment import make_app

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        problem = f"port {port} cannot be used ({error.strerror})"
        raise ConfigError("--port", problem, "set another one, or 0 for a free one") from None
    server = uvicorn.Server(uvicorn.Config(make_app(sandbox, sessions), log_level="warning"))
    if until_stdin_closes:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    listener.listen(sessions)
    print(f"{READY}http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


def _exit_with_parent() -> None:
    """End this process when the one that started it has closed the pipe, or has ended in any way."""
    sys.stdin.read()
    os._exit(0)


@contextmanager
def serving(sandbox: Sandbox, sessions: int) -> Iterator[str]:
    """Start the server as a process of its own, and give its address. It ends with the block."""
    sandbox.check()
    command = [sys.executable, "-m", "composer_plugins.recipes.openenv", "serve", "--until-stdin-closes"]
    command += ["--sessions", str(sessions)] + ([] if sandbox.isolated else [OPTION])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(READY):
                raise ConfigError("server", "it did not start", "read what it printed above")
            yield line.removeprefix(READY).strip()
        finally:
            process.stdin.close()
            try:
                process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
