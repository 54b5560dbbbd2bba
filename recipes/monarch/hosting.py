"""Run a script in processes that Monarch starts: each of them is a rank, as under torchrun.

Monarch's SPMDActor sets RANK, WORLD_SIZE, MASTER_ADDR and the others in each process, and runs the script.
When a rank fails, the others wait for it in a collective operation. So each rank is watched by itself, and no
process is left at the end, whether the script ended well, failed, hung or was interrupted.
"""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import monarch.actor
from monarch.actor import ActorError, this_host
from monarch.spmd import SPMDActor

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.monarch import RankError
from composer_plugins.recipes.monarch.process import Process

ENDED = "its process ended"
HOSTED = "composer_plugins.recipes.monarch.hosted"
POLL = 0.1  # seconds to wait for a rank before the next one is looked at
ASK = 2.0  # seconds between two questions to a process
ANSWER = 10.0  # seconds for an answer of a process whose script has ended
GRACE = 5.0  # seconds after the first failure, which may be a connection lost to the rank that is at fault
LATE = 60.0  # instead, for a rank whose process has ended, which Monarch may report late
STOP = 60.0  # seconds for Monarch to end the processes


class Job(NamedTuple):
    """What to run, and in how many processes."""

    kind: str  # "file" or "module"
    name: str
    arguments: Sequence[str] = ()
    processes: int = 2
    rendezvous_timeout: float = 300.0
    logs: Path | None = None  # the folder for what the ranks print; None: they print where we do
    keeps_records: bool = False  # of the trainers of transformers; a script may keep its own without it


class Rank(NamedTuple):
    """A rank whose script has ended well."""

    process: int  # its id
    ranks: int  # that trained together; 0 if nothing was recorded
    losses: list[float]
    weights: str  # sha256


def host(job: Job) -> list[Rank]:
    """Run the script on every rank; raise RankError if one fails. All processes have ended afterwards."""
    # On several machines this line is another one: see the README.
    hosts, address = this_host(), "127.0.0.1"
    groups: list[int] = []
    with spawned(hosts, job.processes, groups) as mesh:
        points = itertools.product(*map(range, mesh.sizes.values()))  # rank by rank
        at = [dict(zip(mesh.sizes, point, strict=True)) for point in points]
        questions, actors = mesh.spawn("process", Process), mesh.spawn("spmd", SPMDActor)
        asked, told = [questions.slice(**one) for one in at], [actors.slice(**one) for one in at]
        logs = [str(job.logs / f"rank{rank}.log") if job.logs else None for rank in range(len(at))]
        started = [one.prepare.call_one(log, job.keeps_records) for one, log in zip(asked, logs, strict=True)]
        ids = [one.get() for one in started]
        groups += ids if address else []
        name, port = told[0].get_host_port.call_one(None).get()
        command = ["-m", HOSTED, job.kind, job.name, *job.arguments]
        runs = [one.main.call_one(address or name, port, command) for one in told]
        watch(runs, asked, job.rendezvous_timeout, groups)
        records: list[Any] = [one.record.call_one().get() or (0, [], "") for one in asked]
    return [Rank(one, *record) for one, record in zip(ids, records, strict=True)]


@contextmanager
def spawned(hosts: Any, per_host: int, groups: list[int]) -> Iterator[Any]:
    """A mesh of processes, which are stopped at the end, and with them what is in their process groups."""
    hook = monarch.actor.unhandled_fault_hook
    # It interrupts this process when an actor fails, and `watch` sees that too.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    mesh = hosts.spawn_procs(per_host={"gpus": per_host})
    try:
        yield mesh
    finally:
        with suppress(TimeoutError):
            mesh.stop("the script has ended").get(timeout=STOP)
        for group in groups:  # what the script has started; Monarch makes a group for each process
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        monarch.actor.unhandled_fault_hook = hook


def watch(
    runs: Sequence[Any], asked: Sequence[Any], rendezvous_timeout: float, processes: Sequence[int] = ()
) -> None:
    """Wait for all ranks; raise RankError after the first failure, ConfigError for an endless rendezvous.

    `processes` are the ids of the ranks' processes, if they are on this machine.
    """
    running, failed, first_failure = set(range(len(runs))), dict[int, str](), 0.0
    rendezvous = Rendezvous(asked, rendezvous_timeout)
    while running:
        if failed:
            ended = {rank for rank in running if processes and has_ended(processes[rank])}
            if time.monotonic() > first_failure + (LATE if ended else GRACE):
                failed |= {rank: f"{ENDED}, and Monarch did not report how" for rank in ended}
                break
        for rank in sorted(running):
            try:
                runs[rank].get(timeout=POLL)
            except TimeoutError:
                continue
            except Exception as error:  # of Monarch: the script's own arrive as text
                first_failure = first_failure or time.monotonic()
                failed[rank] = failure(asked[rank], error)
            running.discard(rank)
        if not failed:
            rendezvous.check(running)
    if failed:
        raise RankError(report(failed))


def has_ended(process: int) -> bool:
    """Whether a process of this machine has ended, also if its parent has not yet asked for its status."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Path("/proc/self/stat").exists()  # which only Linux has
    return text.rpartition(")")[2].split()[0] in ("Z", "X")


class Rendezvous:
    """Finds ranks that wait too long for the others to join the process group."""

    def __init__(self, asked: Sequence[Any], timeout: float) -> None:
        self.asked, self.timeout = asked, timeout
        self.next = time.monotonic() + ASK
        self.answers = dict[int, Any]()  # not arrived yet: a process that imports torch takes seconds
        self.since = dict[int, float]()

    def check(self, running: set[int]) -> None:
        """Ask where each rank is; raise ConfigError if one has waited for longer than the timeout."""
        now = time.monotonic()
        if now >= self.next:
            self.next = now + ASK
            for rank in running - self.answers.keys():
                self.answers[rank] = self.asked[rank].waits_at.call_one()
        for rank in list(self.answers):
            try:
                where = self.answers[rank].get(timeout=POLL)
            except TimeoutError:
                continue
            except Exception:  # its process has ended, which `watch` reports
                where = None
            del self.answers[rank]
            if where is None or rank not in running:
                self.since.pop(rank, None)
            elif now - self.since.setdefault(rank, now) > self.timeout:
                raise self.error(rank, where, running)

    def error(self, rank: int, where: str, running: set[int]) -> ConfigError:
        """The error for a rank that has waited too long."""
        ended = sorted(set(range(len(self.asked))) - running)
        others = f", and {listed(ended)} ended without it" if ended else ""
        return ConfigError(
            "--rendezvous-timeout",
            f"{listed([rank])} has waited {self.timeout:g} s in init_process_group at {where}{others}",
            "call it on every rank, with the RANK and WORLD_SIZE of the environment, or allow more seconds",
        )


def failure(asked: Any, error: Exception) -> str:
    """Why a rank failed: what its process recorded, or how its process ended."""
    if isinstance(error, ActorError):
        said = asked.failure.call_one().get(timeout=ANSWER)
        return str(said or error)
    return f"{ENDED}: {str(error).strip().splitlines()[-1].strip()}"


def report(failed: dict[int, str]) -> str:
    """Every failure, with the ranks that had it; a process that ended is last, since it is the cause."""
    texts = sorted(set(failed.values()), key=lambda text: text.startswith(ENDED))
    whose = [[rank for rank, said in sorted(failed.items()) if said == text] for text in texts]
    return "\n".join(f"{listed(ranks)} failed: {text}" for ranks, text in zip(whose, texts, strict=True))


def listed(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
