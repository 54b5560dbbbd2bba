"""SkyRL's Tinker-compatible server on this machine, with a tiny model.

Two things that a new machine needs are made in a folder: a `uv`, by which the server starts its engine, and a
`sitecustomize.py`, because pydantic wants `typing_extensions.TypedDict` before Python 3.12.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_plugins.errors import ConfigError

# In sh, because the first line of a script cannot name a Python whose path has a blank. Without exec, because
# the server reads in the command line of its parent how `uv run` was called.
UV = """#!/bin/sh
while [ "$1" != -m ]; do shift; done
{python} "$@"
"""
SITE = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"
SECONDS = 180  # until the server answers


@contextmanager
def served(model: Path, folder: Path, *, sequences: int) -> Iterator[str]:
    """Start the server for the model in this folder; yield its URL, and stop it.

    `sequences` are sampled at once. A batch of sampling has always that size, so that JAX compiles it once.
    Raises ConfigError, with the end of the server's log, if it does not answer.
    """
    site, programs = folder / "site", folder / "bin"
    for one in (site, programs):
        one.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    uv, log = programs / "uv", folder / "server.log"
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a port that nobody listens on
        port = probe.getsockname()[1]
    uv.write_text(UV.format(python=shlex.quote(sys.executable)))
    uv.chmod(0o755)
    backend = {"max_lora_adapters": 2, "max_lora_rank": 16, "sample_max_num_sequences": sequences}
    command = [str(uv), "run", "-m", "skyrl.tinker.api", "--base-model", str(model), "--backend", "jax"]
    command += ["--backend-config", json.dumps(backend), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--database-url", f"sqlite:///{folder / 'tinker.db'}"]
    command += ["--checkpoints-base", str(folder / "checkpoints")]
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(site)}
    env = {**os.environ, **paths, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(url, server, log)
            yield url
        finally:
            with suppress(ProcessLookupError):  # it has stopped by itself
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the server answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    what = f"it did not answer in {SECONDS} seconds" if server.poll() is None else "it stopped"
    last = " ".join(log.read_text().split())[-500:]
    raise ConfigError("server", f"{what}: {last}", "correct what its log says, and run the command again")
