"""`python -m composer_plugins.recipes.diloco`: all replicas on a platform, or one of them in this process."""

import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.launching import Container, Platform, Replica, run_replicas
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.on_this_machine import ThisMachine, lighthouse_on_this_machine
from composer_plugins.recipes.shared import HELP_OPTIONS, check_installed, run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


class On(StrEnum):
    """The platforms."""

    LOCAL = "local"
    MODAL = "modal"
    HF_JOBS = "hf-jobs"


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
        float | None,
        typer.Option(min=0, help="How long to wait for other replicas, in seconds [120; not local: 1800]."),
    ] = None,
    on: Annotated[On, typer.Option(help="Where the replicas train.")] = On.LOCAL,
    image: Annotated[str, typer.Option(help="Not local: the image of a container.")] = Container.image,
    install: Annotated[
        list[str] | None, typer.Option(help="Not local: what pip installs in it first. May be repeated.")
    ] = None,
    flavor: Annotated[str, typer.Option(help="Not local: Modal's GPU, or the flavor of a Job.")] = "",
    secret: Annotated[
        list[str] | None,
        typer.Option(help="Not local: an environment variable to pass as a secret. May be repeated."),
    ] = None,
    job_timeout: Annotated[
        int, typer.Option(min=1, help="Not local: stop a replica after so many seconds.")
    ] = Container.job_timeout,
) -> None:
    """Train the codebook task with DiLoCo and all three channels.

    Without --replica, all replicas train on this machine, each in a process, or on the platform of --on. With
    it, this process is one of them; it needs --lighthouse or --store.
    """
    if steps % sync_every:
        problem = f"{steps} is not a multiple of --sync-every {sync_every}"
        raise ConfigError("--steps", problem, "set one, so that the last round is a whole one")
    if store and lighthouse:
        raise ConfigError("--lighthouse", "--store is set too", "set one of them")
    timeout = (120.0 if on is On.LOCAL else 1800.0) if timeout is None else timeout
    options = Replica(replica or 0, replicas, steps, sync_every, seed, timeout, lighthouse, store, host)
    container = Container(image, flavor, tuple(install or ()), tuple(secret or ()), job_timeout)
    if replica is None:
        sys.exit(0 if run_demo(options, make_platform(on, container, store)) else 1)
    if on is not On.LOCAL:
        raise ConfigError("--on", "--replica trains in this process", "remove one of them")
    if not store and not lighthouse:
        raise ConfigError("--replica", "neither --lighthouse nor --store is set", "set one of them")

    from composer_plugins.recipes.diloco.replica import train_replica

    train_replica(options)


def make_platform(on: On, container: Container, url: str) -> Platform:
    """Return the platform, after checking what can fail before a replica is started."""
    if on is On.LOCAL and container != Container():
        problem = "an option of containers is set, and replicas on this machine are in none"
        raise ConfigError("--on", problem, f"set it to {On.MODAL} or {On.HF_JOBS}, or remove the option")
    store = ObjectStore(url) if url else None
    if on is not On.LOCAL and (not store or store.is_folder):
        problem = f"{url!r} is not the URL of a store that all containers reach"
        raise ConfigError("--store", problem, "set one, such as s3://bucket/run1")
    if on is not On.LOCAL and not container.install and container.image == Container.image:
        remedy = "set it to what pip installs this package from, or set --image to an image that has it"
        raise ConfigError("--install", f"the image {container.image} does not have this package", remedy)
    if store:
        store.check_writable()
    if on is On.LOCAL:
        return ThisMachine()
    if on is On.MODAL:
        check_installed("--on modal", ["modal"], "modal")
        from composer_plugins.recipes.diloco.on_modal import Modal

        return Modal(container)
    check_installed("--on hf-jobs", ["huggingface_hub"], "hf-jobs")
    from composer_plugins.recipes.diloco.on_hf_jobs import HuggingFaceJobs

    return HuggingFaceJobs(container)


def run_demo(options: Replica, platform: Platform) -> bool:
    """Train all replicas; return whether their weights were equal after every round."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    expected = options.steps // options.sync_every
    weights = defaultdict[int, set[tuple[int, str]]](set)  # after each round, of each replica
    transport = f"objects in {options.store}" if options.store else "torchft"
    console.print(
        f"{options.replicas} replicas train {options.steps} steps each and synchronise every "
        f"{options.sync_every} by {transport}; the models are made first"
    )

    def report(line: dict[str, Any]) -> None:
        console.print("   ".join(f"{key} {value}" for key, value in line.items()))
        if "round" in line:
            weights[line["round"]].add((line["replica"], line["weights"]))  # twice, if it was started again

    with ExitStack() as stack:
        if not options.store and not options.lighthouse:
            lighthouse = stack.enter_context(lighthouse_on_this_machine())
            options = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        statuses = run_replicas(options, platform, report)
    if failed := [str(number) for number, status in enumerate(statuses) if status]:
        stopped = ", and all others that ran were stopped" if None in statuses else ""
        console.print(f"FAILED: replica {', '.join(failed)} ended with an error{stopped}")
        return False
    console.print(
        f'"megabytes" is what a replica sends in a round: {expected} times, and {options.steps} times '
        "if the replicas synchronised at every step"
    )
    is_equal = all(len({w for _, w in one}) == 1 for one in weights.values())
    if not is_equal:
        console.print("FAILED: the weights of all replicas were not equal after every round")
    elif sum(map(len, weights.values())) != options.replicas * expected:
        console.print("NOT KNOWN whether the weights of all replicas were equal: the output lacks a round")
    else:
        console.print(f"the weights of all replicas were equal after each of the {expected} rounds")
        return True
    return False


if __name__ == "__main__":
    run_command(app)
