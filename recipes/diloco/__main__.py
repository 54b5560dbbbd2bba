"""`python -m composer_plugins.recipes.diloco`: all replicas on this machine, or one of them."""

import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.launching import Replica, lighthouse_on_this_machine, run_replicas
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.shared import HELP_OPTIONS, run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


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
    timeout: Annotated[
        float, typer.Option(min=0, help="How long to wait for other replicas, in seconds.")
    ] = 120.0,
) -> None:
    """Train the codebook task with DiLoCo and all three channels.

    Without --replica, all replicas train on this machine, each in a process. With it, this process is one of
    them; it needs --lighthouse or --store.
    """
    if steps % sync_every:
        problem = f"{steps} is not a multiple of --sync-every {sync_every}"
        raise ConfigError("--steps", problem, "set one, so that the last round is a whole one")
    if store and lighthouse:
        raise ConfigError("--lighthouse", "--store is set too", "set one of them")
    if store:
        ObjectStore(store)  # an error in it is one line, and not one of each replica
    options = Replica(replica or 0, replicas, steps, sync_every, seed, timeout, lighthouse, store, host)
    if replica is None:
        sys.exit(0 if run_demo(options) else 1)
    if not store and not lighthouse:
        raise ConfigError("--replica", "neither --lighthouse nor --store is set", "set one of them")

    from composer_plugins.recipes.diloco.replica import train_replica

    train_replica(options)


def run_demo(options: Replica) -> bool:
    """Train all replicas on this machine; return whether their weights were equal after every round."""
    console, expected = Console(highlight=False, soft_wrap=True), options.steps // options.sync_every
    weights = defaultdict[int, list[str]](list)  # after each round
    transport = f"objects in {options.store}" if options.store else "torchft"
    console.print(
        f"{options.replicas} replicas train {options.steps} steps each and synchronise every "
        f"{options.sync_every} by {transport}; the models are made first"
    )

    def report(line: dict[str, Any]) -> None:
        console.print("   ".join(f"{key} {value}" for key, value in line.items()))
        if "round" in line:
            weights[line["round"]].append(line["weights"])

    with ExitStack() as stack:
        if not options.store and not options.lighthouse:
            lighthouse = stack.enter_context(lighthouse_on_this_machine())
            options = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        statuses = run_replicas(options, report)
    console.print(
        f'"megabytes" is what a replica sends in a round: {expected} times, and {options.steps} times '
        "if the replicas synchronised at every step"
    )
    failed = [str(number) for number, status in enumerate(statuses) if status]
    equal = [one == one[:1] * options.replicas for one in weights.values()]
    if failed:
        console.print(f"FAILED: replica {', '.join(failed)} ended with an error")
    elif equal != [True] * expected:
        console.print("FAILED: the weights of all replicas were not equal after every round")
    else:
        console.print(f"the weights of all replicas were equal after each of the {expected} rounds")
        return True
    return False


if __name__ == "__main__":
    run_command(app)
