"""Replicas as processes on this machine, and torchft's lighthouse for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from composer_plugins.recipes.diloco.launching import Replica


class LocalJob:
    """A replica in a process."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def lines(self) -> Iterator[str]:
        """Yield what it prints. Its errors go to the terminal."""
        assert self.process.stdout
        with self.process.stdout as output:
            yield from output

    def wait(self) -> int:
        """Return the exit status, or the number of the signal that ended it, with a minus."""
        return self.process.wait()

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


class ThisMachine:
    """The platform of the demo."""

    def start(self, options: Replica) -> LocalJob:
        """Start a replica."""
        return LocalJob(options.command(sys.executable))


@contextmanager
def lighthouse_on_this_machine() -> Iterator[str]:
    """Start torchft's lighthouse on a free port; yield its address."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported; else it logs every quorum
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=2_000
    )
    try:
        yield "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]
    finally:
        server.shutdown()
