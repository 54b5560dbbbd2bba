"""Processes of a test, which start in milliseconds and end with it."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 240  # the limit of whatever waits for a process

FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["parity_tests.rigs.replayed"]  # what takes long to import; a test may add to it


@contextmanager
def processes(target: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give a function that starts `target` in a process; kill all that are left at the end."""
    FORKSERVER.set_forkserver_preload(PRELOAD)
    started = []

    def start(*arguments: Any, **options: Any) -> Any:
        process = FORKSERVER.Process(target=target, args=arguments, kwargs=options, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            with contextlib.suppress(ValueError):  # it is closed
                process.kill()
                process.join(SECONDS)


def ended(process: Any) -> int:
    """Wait for the end of a process; return its exit code."""
    process.join(SECONDS)
    assert process.exitcode is not None, "a process did not end"
    return int(process.exitcode)
