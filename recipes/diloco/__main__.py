"""`python -m composer_plugins.recipes.diloco`: all replicas on this machine, or one of them."""

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_plugins.errors import ComposerError, ConfigError

FINAL_STEPS = 10
DEMO_SECONDS = 900  # then the demo ends its replicas and fails
HASH_DIGITS = 12

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def main(
    replicas: Annotated[int, typer.Option(help="How many replicas train.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each replica.")] = 60,
    sync_every: Annotated[int, typer.Option(help="Optimizer steps between synchronisations.")] = 10,
    seed: Annotated[int, typer.Option(help="The seed of the codebook and of the initial weights.")] = 0,
    store: Annotated[str, typer.Option(help="Synchronise by this folder or URL (s3://, gs://).")] = "",
    replica: Annotated[
        int | None, typer.Option(help="Train this replica alone, in this process (from 0).")
    ] = None,
    lighthouse: Annotated[str, typer.Option(help="The address of torchft's lighthouse.")] = "",
    host: Annotated[str, typer.Option(help="The address of this machine for the others.")] = "",
    timeout: Annotated[float, typer.Option(help="How long to wait for other replicas, in seconds.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train the codebook task with DiLoCo and all three channels.

    Without --replica, all replicas train on this machine, each in a process. With it, this process is one of
    them; it needs --lighthouse or --store.
    """
    if replicas < 2:
        raise ConfigError("--replicas", f"it is {replicas}", "set 2 or more")
    if sync_every < 1 or steps < 1 or steps % sync_every:
        problem = f"{steps} is not a multiple of --sync-every {sync_every}"
        raise ConfigError("--steps", problem, "set both from 1, so that the last round is a whole one")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ConfigError("--timeout", f"it is {timeout:g}", "set seconds above 0")
    if store and lighthouse:
        raise ConfigError("--lighthouse", "--store is set too", "set one of them")
    if host and (store or replica is None):
        raise ConfigError("--host", "it is for a replica with --lighthouse", "remove it")
    common = ["--replicas", replicas, "--steps", steps, "--sync-every", sync_every, "--seed", seed]
    common += ["--timeout", timeout] + (["--store", store] if store else [])
    if replica is None:
        if lighthouse:
            raise ConfigError("--lighthouse", "--replica is not set", "set it, or remove --lighthouse")
        if as_json:
            raise ConfigError("--json", "it is for a single replica", "set --replica, or remove it")
        if store:
            check_is_new(store)
        sys.exit(0 if run_demo([str(one) for one in common], replicas, steps, sync_every, store) else 1)
    if not 0 <= replica < replicas:
        raise ConfigError("--replica", f"it is {replica}", f"number the {replicas} replicas from 0")
    if not store and not lighthouse:
        raise ConfigError("--replica", "neither --lighthouse nor --store is set", "set one of them")

    if until_stdin_closes:
        threading.Thread(target=exit_with_parent, daemon=True).start()

    from composer_plugins.recipes.diloco.replica import Replica, train_replica

    options = Replica(replica, replicas, steps, sync_every, seed, timeout, lighthouse, store, host)
    train_replica(options, print_json if as_json else print_line)


def check_is_new(store: str) -> None:
    """Raise ConfigError if the store has a run, which only a replica that starts again may find."""
    from composer_plugins.recipes.diloco.object_store import ObjectStore

    if ObjectStore(store).read("run.json") is not None:
        remedy = "name a new one, or go on with that run by starting each replica with --replica"
        raise ConfigError("--store", f"{store} has a run already", remedy)


def exit_with_parent() -> None:
    """End this process when the one that started it has closed the pipe, or has ended in any way."""
    while os.read(0, 1024):  # sys.stdin would hold a lock when this process ends before its parent
        pass
    os._exit(1)


def print_json(event: dict[str, Any]) -> None:
    """Print an event of a replica for a program."""
    print(json.dumps(event), flush=True)


def print_line(event: dict[str, Any]) -> None:
    """Print an event of a replica for a reader."""
    if "rewards" in event:
        first, final = event["rewards"][0], mean(event["rewards"][-FINAL_STEPS:])
        text = f"reward: {first:.2f} at first, {final:.2f} at last; greedy {event['greedy']:.2f}"
    else:
        reward = "none" if event["reward"] is None else f"{event['reward']:.2f}"
        text = f"round {event['number']}: replicas {', '.join(event['participants'])}, "
        text += f"weights {event['weights'][:HASH_DIGITS]}, reward {reward}"
    print(text, flush=True)


@dataclass
class Run:
    """What the replicas of a demo have reported."""

    replicas: int
    rounds: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by number, by replica
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # by replica
    unequal: list[int] = field(default_factory=list)  # rounds after which the weights differed

    def add(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Note an event; return the reports of its round if all replicas have reported it."""
        if "rewards" in event:
            self.results[event["replica"]] = event
            return []
        reports = self.rounds.setdefault(event["number"], {})
        reports[event["replica"]] = event
        if len(reports) < self.replicas:
            return []
        if len({report["weights"] for report in reports.values()}) > 1:
            self.unequal.append(event["number"])
        return [reports[replica] for replica in sorted(reports)]


def run_demo(common: list[str], replicas: int, steps: int, sync_every: int, store: str) -> bool:
    """Train all replicas on this machine; return whether their weights were equal after every round."""
    console, run = Console(), Run(replicas)
    transport = f"objects in {store}" if store else "torchft"
    console.print(
        f"{replicas} replicas train {steps} steps each and synchronise every {sync_every} by {transport}; "
        "the models are made first",
        soft_wrap=True,
    )
    with ExitStack() as stack:
        where = [] if store else ["--lighthouse", stack.enter_context(lighthouse_on_this_machine())]
        processes = stack.enter_context(started([*common, *where, "--json"], replicas))
        for event in processes.events():
            if reports := run.add(event):
                print_round(console, reports)
    print_results(console, run, steps, sync_every)
    expected = steps // sync_every
    whole = [number for number, reports in run.rounds.items() if len(reports) == replicas]
    if run.unequal:
        console.print(f"FAILED: the weights differ after round {', '.join(map(str, run.unequal))}")
    elif len(whole) != expected:
        console.print(f"FAILED: {len(whole)} of {expected} rounds were reported by all replicas")
    else:
        console.print(f"the weights of all replicas were equal after each of the {expected} rounds")
    return not run.unequal and len(whole) == expected


@contextmanager
def lighthouse_on_this_machine() -> Iterator[str]:
    """Start torchft's lighthouse on a free port; yield its address."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported; else it logs every quorum
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000)
    try:
        yield "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]
    finally:
        server.shutdown()


@dataclass
class Processes:
    """The replicas of a demo, and what they print."""

    processes: list[subprocess.Popen[str]]
    errors: Sequence[IO[str]]
    lines: "queue.Queue[tuple[int, str | None]]" = field(default_factory=queue.Queue)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the replicas report until all have ended; raise if one fails or time is over."""
        for number, process in enumerate(self.processes):
            threading.Thread(target=self.read, args=(number, process), daemon=True).start()
        running, ends = set(range(len(self.processes))), time.monotonic() + DEMO_SECONDS
        while running:
            try:
                number, line = self.lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                problem = f"the replicas have not ended within {DEMO_SECONDS} seconds"
                raise ConfigError(
                    "--steps", problem, "set fewer, or start each replica with --replica"
                ) from None
            if line is not None:
                yield json.loads(line)
                continue
            running.discard(number)
            if self.processes[number].wait():
                self.errors[number].seek(0)
                sys.stderr.write(self.errors[number].read())
                print(
                    f"error: replica {number} ended with status {self.processes[number].returncode}",
                    file=sys.stderr,
                )
                sys.exit(2)

    def read(self, number: int, process: subprocess.Popen[str]) -> None:
        """Put each line that a process prints into the queue, and None at its end."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.lines.put((number, line))
        self.lines.put((number, None))


@contextmanager
def started(arguments: list[str], replicas: int) -> Iterator[Processes]:
    """Start the replicas, each by the command that starts it on a machine of its own; end them at the end."""
    command = [sys.executable, "-m", "composer_plugins.recipes.diloco", *arguments]
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(replicas)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for number in range(replicas):
                own = [*command, "--replica", str(number), "--until-stdin-closes"]
                if "--lighthouse" in arguments:
                    own += ["--host", "127.0.0.1"]
                processes.append(
                    subprocess.Popen(
                        own,
                        stdin=subprocess.PIPE,  # it closes when this process ends, also by SIGKILL
                        stdout=subprocess.PIPE,
                        stderr=errors[number],
                        text=True,
                    )
                )
            yield Processes(processes, errors)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


def print_round(console: Console, reports: list[dict[str, Any]]) -> None:
    """Print a line for a round that all replicas have reported."""
    hashes = " ".join(report["weights"][:HASH_DIGITS] for report in reports)
    rewards = " ".join("-" if report["reward"] is None else f"{report['reward']:.2f}" for report in reports)
    participants = " ".join(reports[0]["participants"])
    console.print(
        f"round {reports[0]['number']:>3}   replicas {participants}   weights {hashes}   reward {rewards}",
        soft_wrap=True,
        highlight=False,
    )


def print_results(console: Console, run: Run, steps: int, sync_every: int) -> None:
    """Print the rewards of each replica, and the bytes."""
    table = Table(
        "replica", "first reward", f"mean of last {FINAL_STEPS}", "greedy accuracy", "sent", "every step"
    )
    for number, result in sorted(run.results.items()):
        rewards = result["rewards"]
        whole = result["bytes_of_weights"]
        # With torchft a replica sends its pseudo-gradient once, in parts: the gloo library's ring all-reduce.
        ring = 2 * (run.replicas - 1) / run.replicas * whole
        sent = result.get("sent", ring * (steps // sync_every))
        table.add_row(
            str(number),
            f"{rewards[0]:.2f}",
            f"{mean(rewards[-FINAL_STEPS:]):.2f}",
            f"{result['greedy']:.2f}",
            megabytes(sent),
            megabytes(sent * sync_every),
        )
    console.print(table)
    console.print(
        '"sent" is what a replica sent in all rounds, "every step" what it would have sent, had it '
        "synchronised at every optimizer step",
        soft_wrap=True,
    )


def megabytes(count: float) -> str:
    """A number of bytes for a reader."""
    return f"{count / 1e6:.1f} MB"


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


if __name__ == "__main__":
    try:
        app()
    except ComposerError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)
