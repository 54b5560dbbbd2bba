"""The replicas of the demo, each in a process of this machine.

A process of multiprocessing finds its function in a module that is not the program itself, as __main__.py is.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from composer_plugins.errors import ComposerError, ConfigError
from composer_plugins.recipes.diloco import Replica

DEMO_SECONDS = 900  # then the demo ends its replicas and fails


@contextmanager
def started(options: Replica) -> Iterator[Iterator[dict[str, Any]]]:
    """Train all replicas, each in a process; give what they report. No process is left at the end."""
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, tuple[BaseProcess, Path]] = {}  # by the connection that has its events
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(options.replicas):
                events, sent = context.Pipe(duplex=False)
                output = Path(folder, f"replica {number}")
                output.touch()
                arguments = (replace(options, replica=number), sent, output)
                process: BaseProcess = context.Process(target=train_in_process, args=arguments)
                process.start()
                sent.close()
                processes[events] = process, output
            yield reported(processes)
        finally:
            for process, _ in processes.values():
                process.kill()
                process.join()


def reported(processes: Mapping[Connection, tuple[BaseProcess, Path]]) -> Iterator[dict[str, Any]]:
    """Yield what the replicas report until all have ended; raise if one fails or time is over."""
    running, ends = dict(processes), time.monotonic() + DEMO_SECONDS
    while running:
        ready = wait(list(running), max(0.0, ends - time.monotonic()))
        if not ready:
            problem = f"the replicas have not ended within {DEMO_SECONDS} seconds"
            raise ConfigError("--steps", problem, "set fewer, or start each replica with --replica")
        for events in [one for one in running if one in ready]:
            try:
                yield events.recv()
            except EOFError:
                process, output = running.pop(events)
                process.join()
                if process.exitcode:
                    sys.stderr.write(output.read_text())
                    print(f"error: {output.name} ended with status {process.exitcode}", file=sys.stderr)
                    sys.exit(2)


def train_in_process(options: Replica, events: Connection, output: Path) -> None:
    """Train a replica in this process, which ends with its parent, and write what it prints to a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=exit_with_parent, daemon=True).start()

    from composer_plugins.recipes.diloco.replica import train_replica

    try:
        train_replica(options, events.send)
    except ComposerError as error:
        sys.exit(f"error: {error}")


def exit_with_parent() -> None:
    """End this process when the one that started it has ended in any way."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
