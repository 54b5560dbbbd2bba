"""`python -m composer_plugins.recipes.monarch`: a demo, or a script of yours, under Monarch."""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from composer_plugins.recipes.shared import check_installed, run_command

STEPS = 4
STOP = 60.0  # seconds for Monarch to end the processes
RECIPES = Path(__file__).resolve().parent.parent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
def run(
    script: Annotated[
        str | None, typer.Argument(help="Your training script, written for torchrun. Not given: the demo.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The arguments of the script.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many processes to start.")] = 2,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="The script is a module, as in python -m.")
    ] = False,
) -> None:
    """Run a training script in several processes that Monarch starts, as torchrun would."""
    check_installed("monarch", ("monarch", "torch", "trl"), "monarch")
    if script is None:
        demo(processes)
    else:
        host([*(["-m"] if module else []), script, *(arguments or [])], processes)


def host(command: Sequence[str], processes: int) -> None:
    """Run a script, or a module after -m, on every rank. All processes have ended afterwards."""
    import monarch.actor
    from monarch.actor import this_host
    from monarch.spmd import SPMDActor

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; the processes inherit it
    # Monarch's own hook ends this process before the traceback of a rank that fails is shown.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    mesh = this_host().spawn_procs(per_host={"gpus": processes})  # on several machines: see the README
    try:
        ranks = mesh.spawn("spmd", SPMDActor)
        _, port = ranks.slice(gpus=0).get_host_port.call_one(None).get()
        runs = [
            ranks.slice(gpus=rank).main.call_one("127.0.0.1", port, list(command))
            for rank in range(processes)
        ]
        asyncio.run(all_of(runs))
    finally:
        mesh.stop("the script has ended").get(timeout=STOP)


async def all_of(runs: Sequence[Awaitable[bool]]) -> None:
    """Wait for all ranks, or until one fails. Monarch's own `call` would wait for the others then."""
    await asyncio.gather(*runs)


def demo(processes: int) -> None:
    """Run TRL's recipe."""
    console = Console()
    console.print(f"recipes/trl/train.py in {processes} processes")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--config": RECIPES / "trl" / "three_channels.yaml",
            "--output_dir": Path(folder, "trl_out"),
            "--max_steps": STEPS,
            "--logging_steps": 1,
            "--per_device_train_batch_size": 16,
            "--use_cpu": True,
        }
        arguments = [str(part) for option in options.items() for part in option]
        host([str(RECIPES / "trl" / "train.py"), *arguments], processes)
    console.print(f"recipes/trl/train.py took {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    run_command(app)
