"""Start the replicas, each as a process of its own, here on this machine.

A launcher for other machines needs the same three things: the command of each replica, the lines of JSON that
it prints, and its exit status. With --store, a replica that failed goes on when its command is started again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Replica:
    """The options of one replica."""

    replica: int
    replicas: int
    steps: int
    sync_every: int
    seed: int
    timeout: float
    lighthouse: str = ""
    store: str = ""
    host: str = ""

    def command(self) -> list[str]:
        """Return the command line of this replica."""
        given = {name.replace("_", "-"): value for name, value in vars(self).items() if value != ""}
        flags = [f"--{name}={value}" for name, value in given.items()]
        return [sys.executable, "-m", "composer_plugins.recipes.diloco", *flags]


def run_replicas(options: Replica, report: Callable[[dict[str, Any]], None]) -> list[int]:
    """Train all replicas, call `report` with each line that they print, and return their exit statuses."""
    output, ours = os.pipe()
    processes = []
    try:
        for number in range(options.replicas):
            processes.append(subprocess.Popen(replace(options, replica=number).command(), stdout=ours))
        os.close(ours)
        with open(output) as lines:
            for line in lines:
                report(json.loads(line))
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
