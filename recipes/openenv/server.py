"""The environment's server: `serve` runs it in this process, `serving` in another one."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from composer_plugins.errors import ConfigError

READY = "the environment is served at "
NO_SANDBOX = (
    "This is no sandbox: the code that the model writes runs with your rights. "
    "--url ADDRESS trains on a server in a container."
)


def serve(host: str, port: int, sessions: int, *, until_stdin_closes: bool = False) -> None:
    """Serve until a signal; port 0 lets the system choose one. The address is printed."""
    import uvicorn

    from composer_plugins.recipes.openenv.environment import make_app

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        problem = f"port {port} cannot be used ({error.strerror})"
        raise ConfigError("--port", problem, "set another one, or 0 for a free one") from None
    server = uvicorn.Server(uvicorn.Config(make_app(sessions), log_level="warning"))
    if until_stdin_closes:
        threading.Thread(target=exit_with_parent, daemon=True).start()
    listener.listen(sessions)
    print(f"{READY}http://{host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


def exit_with_parent() -> None:
    """End this process when the one that started it has ended in any way, which closes the pipe."""
    sys.stdin.read()
    os._exit(0)


@contextmanager
def serving(sessions: int) -> Iterator[str]:
    """Start the server as a process of this machine, and give its address. It ends with the block."""
    command = [sys.executable, "-m", "composer_plugins.recipes.openenv", "serve", "--until-stdin-closes"]
    command += ["--sessions", str(sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(READY):
                raise ConfigError("server", "it did not start", "read what it printed above")
            yield line.removeprefix(READY).strip()
        finally:
            process.kill()
