"""Start the replicas on a platform, restart a failed one once, and stop all if it fails a second time.

A platform is this machine (on_this_machine.py), Modal (on_modal.py) or Hugging Face Jobs (on_hf_jobs.py).
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from composer_plugins.errors import ComposerError, ConfigError, DataError, in_a_line

THREAD_SECONDS = 5.0
AGAIN = "start the same command again later: it goes on with the rounds in the store"
STOPPING = "all are stopped; until then Ctrl-C does nothing"


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

    def command(self, python: str) -> list[str]:
        """Return the command line of this replica."""
        given = {name.replace("_", "-"): value for name, value in vars(self).items() if value != ""}
        flags = [f"--{name}={value}" for name, value in given.items()]
        return [python, "-m", "composer_plugins.recipes.diloco", *flags]


@dataclass(frozen=True)
class Container:
    """What a replica runs in, if it does not run on this machine."""

    image: str = "python:3.12"
    flavor: str = ""  # the platform's name for the hardware
    install: tuple[str, ...] = ()  # what pip installs before the replica starts
    secrets: tuple[str, ...] = ()  # environment variables of this machine
    job_timeout: int = 3600  # in seconds; the platform stops a job after it

    def command(self, options: Replica) -> list[str]:
        """Return the command line of the container. Its errors are lines of its output."""
        pip = f"pip install --quiet {shlex.join(self.install)} && " if self.install else ""
        return ["bash", "-c", f"exec 2>&1; {pip}exec {shlex.join(options.command('python'))}"]

    def secret_values(self) -> dict[str, str]:
        """Return the values of the secrets."""
        if absent := [name for name in self.secrets if not os.environ.get(name, "").strip()]:
            problem = f"{absent[0]} is {'blank' if absent[0] in os.environ else 'not set'} in the environment"
            raise ConfigError("--secret", problem, f"run export {absent[0]}=... before, or leave it out")
        return {name: os.environ[name] for name in self.secrets}


class Job(Protocol):
    """A replica that a platform has started."""

    def lines(self) -> Iterable[str]:
        """Yield what the job prints, until it ends."""

    def wait(self) -> int:
        """Wait until the job ends; return its exit status."""

    def stop(self) -> None:
        """End the job. If it has ended, do nothing."""


class Platform(Protocol):
    """Where jobs run."""

    def start(self, options: Replica) -> Job:
        """Start a replica; raise ConfigError if the platform refuses."""


@contextmanager
def client_errors(
    platform: str,
    kinds: tuple[type[Exception], ...],
    remedy: Callable[[Any], str | None],
    page: str = "",  # in a start: where the platform lists a job that has begun and was not returned
) -> Iterator[None]:
    """Raise ConfigError if the platform's client raises one of its errors, or Ctrl-C interrupts a start."""
    caught: tuple[type[BaseException], ...] = (*kinds, KeyboardInterrupt) if page else kinds
    try:
        yield
    except caught as error:
        again = f"a replica may be running: look at {page} and stop it, then {AGAIN}" if page else AGAIN
        raise ConfigError(f"--on {platform}", in_a_line(error, most=300), remedy(error) or again) from None


def run_replicas(
    options: Replica, platform: Platform, report: Callable[[dict[str, Any]], None]
) -> list[int | None]:
    """Train all replicas and return their exit statuses; call `report` with each line that they print.

    With a store, a replica that fails is started again once, and all are stopped if it fails again, with
    the status None. With torchft the others train on. The jobs are stopped, whatever this raises.
    """
    events = SimpleQueue[tuple[int, str | int | Exception]]()
    running: dict[int, Job] = {}
    threads = list[Thread]()
    statuses: dict[int, int] = {}
    restarted = set[int]()
    interrupts_left = 1  # the last of them raises KeyboardInterrupt, and those after it do nothing

    def interrupt(*_: object) -> None:
        nonlocal interrupts_left
        interrupts_left -= 1
        if interrupts_left == 0:
            raise KeyboardInterrupt

    def start(number: int) -> None:
        nonlocal interrupts_left
        interrupts_left = 2  # the first one waits for the start: only a job that is returned can be stopped
        running[number] = platform.start(replace(options, replica=number))
        interrupt()
        threads.append(Thread(target=follow, args=(running[number], number, events), daemon=True))
        threads[-1].start()

    with signals_to(interrupt):
        try:
            for number in range(options.replicas):
                start(number)
            while running:
                number, event = events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, str):
                    report(parse_line(number, event))
                    continue
                del running[number]
                statuses[number] = event
                if not event or not options.store:
                    continue
                is_over = number in restarted
                what = STOPPING if is_over else "it is started again"
                report({"replica": number, "exit_status": event, "next": what})
                if is_over:
                    break
                restarted.add(number)
                start(number)
        except BaseException:
            if running:
                report({"next": STOPPING})
            raise
        finally:
            interrupts_left = 0
            stop_all(running)
            for thread in threads:  # they end with their jobs; a client may complain if Python ends first
                thread.join(THREAD_SECONDS)
    return [None if number in running else statuses[number] for number in range(options.replicas)]


@contextmanager
def signals_to(handler: Callable[..., None]) -> Iterator[None]:
    """Call `handler` for Ctrl-C, kill and a closed terminal, except for those that nohup switched off."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: was for one in numbers if (was := signal.getsignal(one)) is not signal.SIG_IGN}
    try:
        for one in before:
            signal.signal(one, handler)
        yield
    finally:
        for one, was in before.items():
            signal.signal(one, was)


def follow(job: Job, number: int, events: "SimpleQueue[tuple[int, str | int | Exception]]") -> None:
    """Put the lines of a job into `events`, and then its exit status or what keeps us from having it."""
    try:
        for line in job.lines():
            events.put((number, line))
    except Exception as error:  # the job may train on
        events.put((number, f"the rest of the output cannot be read ({in_a_line(error)})"))
    try:
        events.put((number, job.wait()))
    except Exception as error:
        events.put((number, error))


def parse_line(number: int, line: str) -> dict[str, Any]:
    """Return the JSON that a replica has printed. Another line, of pip or of an error, is its "output"."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    is_ours = isinstance(found, dict) and "replica" in found
    return found if is_ours else {"replica": number, "output": line.rstrip()}


def stop_all(running: dict[int, Job]) -> None:
    """Stop all jobs, also if one of them cannot be stopped; add the first error to their DataError."""
    left = []
    for number, job in running.items():
        try:
            job.stop()
        except Exception as error:
            left.append(f"replica {number} ({in_a_line(error, most=300)})")
    if left:
        problem = f"{', '.join(left)} could not be stopped"
        failure = DataError("replicas", problem, "stop it on the platform's website, which counts its time")
        if isinstance(first := sys.exc_info()[1], Exception):
            ours = isinstance(first, ComposerError) and first
            failure.others = (ours or DataError("replicas", in_a_line(first), AGAIN),)
        raise failure
