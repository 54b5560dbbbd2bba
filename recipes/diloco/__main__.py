"""`python -m composer_plugins.recipes.diloco`: all replicas on this machine, or one of them."""

import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco import Replica
from composer_plugins.recipes.diloco.launching import started
from composer_plugins.recipes.shared import run_command

FINAL_STEPS = 10
HASH_DIGITS = 12

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def main(
    replicas: Annotated[int, typer.Option(min=2, help="How many replicas train.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each replica.")] = 60,
    sync_every: Annotated[int, typer.Option(min=1, help="Optimizer steps between synchronisations.")] = 10,
    seed: Annotated[int, typer.Option(help="The seed of the codebook and of the initial weights.")] = 0,
    store: Annotated[str, typer.Option(help="Synchronise by this folder or URL (s3://, gs://).")] = "",
    replica: Annotated[
        int | None, typer.Option(min=0, help="Train this replica alone, in this process (from 0).")
    ] = None,
    lighthouse: Annotated[str, typer.Option(help="The address of torchft's lighthouse.")] = "",
    host: Annotated[str, typer.Option(help="The address of this machine for the others.")] = "",
    timeout: Annotated[float, typer.Option(help="How long to wait for other replicas, in seconds.")] = 120.0,
) -> None:
    """Train the codebook task with DiLoCo and all three channels.

    Without --replica, all replicas train on this machine, each in a process. With it, this process is one of
    them; it needs --lighthouse or --store.
    """
    if steps % sync_every:
        problem = f"{steps} is not a multiple of --sync-every {sync_every}"
        raise ConfigError("--steps", problem, "set one, so that the last round is a whole one")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ConfigError("--timeout", f"it is {timeout:g}", "set seconds above 0")
    if store and lighthouse:
        raise ConfigError("--lighthouse", "--store is set too", "set one of them")
    if host and (store or replica is None):
        raise ConfigError("--host", "it is for a replica with --lighthouse", "remove it")
    options = Replica(replica or 0, replicas, steps, sync_every, seed, timeout, lighthouse, store, host)
    if replica is None:
        if lighthouse:
            raise ConfigError("--lighthouse", "--replica is not set", "set it, or remove --lighthouse")
        if store:
            from composer_plugins.recipes.diloco.object_store import ObjectStore

            if ObjectStore(store).read("run.json") is not None:
                remedy = "name a new one, or go on with that run by starting each replica with --replica"
                raise ConfigError("--store", f"{store} has a run already", remedy)
        sys.exit(0 if run_demo(options) else 1)
    if replica >= replicas:
        raise ConfigError("--replica", f"it is {replica}", f"number the {replicas} replicas from 0")
    if not store and not lighthouse:
        raise ConfigError("--replica", "neither --lighthouse nor --store is set", "set one of them")

    from composer_plugins.recipes.diloco.replica import train_replica

    train_replica(options, print_event)


def print_event(event: dict[str, Any]) -> None:
    """Print what a single replica reports."""
    if "rewards" in event:
        first, final = event["rewards"][0], fmean(event["rewards"][-FINAL_STEPS:])
        text = f"reward: {first:.2f} at first, {final:.2f} at last; greedy {event['greedy']:.2f}"
        print(text, flush=True)
    else:
        print(line_of([event]), flush=True)


def run_demo(options: Replica) -> bool:
    """Train all replicas on this machine; return whether their weights were equal after every round."""
    console, expected = Console(highlight=False), options.steps // options.sync_every
    rounds = defaultdict[int, dict[int, dict[str, Any]]](dict)  # the reports by round and replica
    results: dict[int, dict[str, Any]] = {}  # by replica
    transport = f"objects in {options.store}" if options.store else "torchft"
    console.print(
        f"{options.replicas} replicas train {options.steps} steps each and synchronise every "
        f"{options.sync_every} by {transport}; the models are made first",
        soft_wrap=True,
    )
    with ExitStack() as stack:
        if not options.store:
            lighthouse = stack.enter_context(lighthouse_on_this_machine())
            options = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        for event in stack.enter_context(started(options)):
            if "rewards" in event:
                results[event["replica"]] = event
                continue
            reports = rounds[event["number"]]
            reports[event["replica"]] = event
            if len(reports) == options.replicas:
                console.print(line_of([reports[one] for one in sorted(reports)]), soft_wrap=True)
    console.print(table_of(results, options))
    console.print(
        '"sent" is what a replica sent in all rounds, "every step" what it would have sent, had it '
        "synchronised at every optimizer step",
        soft_wrap=True,
    )
    whole = [number for number, reports in rounds.items() if len(reports) == options.replicas]
    unequal = [one for one in whole if len({report["weights"] for report in rounds[one].values()}) > 1]
    if unequal:
        console.print(f"FAILED: the weights differ after round {', '.join(map(str, unequal))}")
    elif len(whole) != expected:
        console.print(f"FAILED: {len(whole)} of {expected} rounds were reported by all replicas")
    else:
        console.print(f"the weights of all replicas were equal after each of the {expected} rounds")
    return not unequal and len(whole) == expected


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


def line_of(reports: list[dict[str, Any]]) -> str:
    """A line for a round, from the reports of some replicas."""
    hashes = " ".join(report["weights"][:HASH_DIGITS] for report in reports)
    rewards = " ".join("-" if report["reward"] is None else f"{report['reward']:.2f}" for report in reports)
    participants = " ".join(reports[0]["participants"])
    number = reports[0]["number"]
    return f"round {number:>3}   replicas {participants}   weights {hashes}   reward {rewards}"


def table_of(results: Mapping[int, dict[str, Any]], options: Replica) -> Table:
    """The rewards of each replica, and the megabytes that it sent."""
    table = Table(
        "replica", "first reward", f"mean of last {FINAL_STEPS}", "greedy accuracy", "sent", "every step"
    )
    for number, result in sorted(results.items()):
        rewards = result["rewards"]
        # With torchft a replica sends its pseudo-gradient once, in parts: the gloo library's ring all-reduce.
        ring = 2 * (options.replicas - 1) / options.replicas * result["bytes_of_weights"]
        sent = result.get("sent", ring * (options.steps // options.sync_every)) / 1e6
        shown = (rewards[0], fmean(rewards[-FINAL_STEPS:]), result["greedy"])
        table.add_row(
            str(number),
            *(f"{value:.2f}" for value in shown),
            f"{sent:.1f} MB",
            f"{sent * options.sync_every:.1f} MB",
        )
    return table


if __name__ == "__main__":
    run_command(app)
