"""`python -m composer_plugins.recipes.monarch`: two demo runs, or a script of yours, under Monarch."""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.monarch import RankError
from composer_plugins.recipes.shared import INTERRUPTED, check_installed, run_command

if TYPE_CHECKING:
    from composer_plugins.recipes.monarch.hosting import Rank

STEPS = 4
RECIPES = Path(__file__).resolve().parent.parent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
def run(
    script: Annotated[
        str | None, typer.Argument(help="Your training script, written for torchrun. Not given: the demo.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The arguments of the script.")] = None,
    processes: Annotated[int, typer.Option(help="How many processes to start.")] = 2,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="The script is a module, as in python -m.")
    ] = False,
    rendezvous_timeout: Annotated[
        float, typer.Option(help="The seconds that a rank may wait in init_process_group for the others.")
    ] = 300.0,
) -> None:
    """Run a training script in several processes that Monarch starts and watches, as torchrun would."""
    if processes < 1:
        raise ConfigError("--processes", f"it is {processes}", "set 1 or more")
    if not rendezvous_timeout > 0:  # nan too
        raise ConfigError("--rendezvous-timeout", f"it is {rendezvous_timeout:g}", "set seconds above 0")
    if module and script is None:
        raise ConfigError("-m", "no module is named", "write the module and its arguments behind it")
    needed = ("monarch", "torch") if script else ("monarch", "torch", "trl", "transformers")
    check_installed("monarch", needed, "monarch")
    try:
        if script is None:
            demo(processes, rendezvous_timeout)
        else:
            host_script(script, arguments or [], processes, module, rendezvous_timeout)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: all processes were ended")
        raise typer.Exit(INTERRUPTED) from None


def host_script(
    script: str, arguments: list[str], processes: int, module: bool, rendezvous_timeout: float
) -> None:
    """Run the user's script, whose output is not changed; then one line."""
    from composer_plugins.recipes.monarch.hosting import Job, host

    if module:
        check_module(script)
    elif not Path(script).is_file():
        problem = "it is a folder" if Path(script).is_dir() else "there is no such file"
        raise ConfigError(script, problem, "name a Python file, or a module after -m")
    name, kind = (script, "module") if module else (str(Path(script).resolve()), "file")
    start = time.monotonic()
    ranks = host(Job(kind, name, arguments, processes, rendezvous_timeout))
    seconds = time.monotonic() - start
    Console(stderr=True).print(f"{script}: {len(ranks)} processes ended well after {seconds:.0f} s")


def demo(processes: int, rendezvous_timeout: float) -> None:
    """Run TRL's recipe and a script like PRIME-RL's trainer, and show what each rank has at the end."""
    from composer_plugins.recipes.monarch.hosting import Job, host

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--config": RECIPES / "trl" / "three_channels.yaml",
            "--output_dir": Path(folder, "trl_out"),
            "--max_steps": STEPS,
            "--logging_steps": 1,
            "--per_device_train_batch_size": 16,
            "--use_cpu": True,
        }
        trl = [str(part) for option in options.items() for part in option]
        scripts = {"trl/train.py": trl, "monarch/prime_rl_like.py": ["--steps", str(STEPS)]}
        for name, arguments in scripts.items():
            path, title = RECIPES / name, f"recipes/{name}"
            logs = Path(folder, path.stem)
            logs.mkdir()
            job = Job("file", str(path), arguments, processes, rendezvous_timeout, logs, keeps_records=True)
            with console.status(f"{title} in {processes} processes"):
                start = time.monotonic()
                ranks = host(job)
                seconds = time.monotonic() - start
            console.print(table(title, ranks, seconds))
            check_equal(title, ranks)
    console.print("On every rank the losses and the weights are equal.")


def table(title: str, ranks: "list[Rank]", seconds: float) -> Table:
    """What each rank has at the end of a run. It fits 80 columns."""
    found = Table(title=f"{title}: {seconds:.0f} s", box=SIMPLE_HEAD, title_justify="left")
    for column in ("rank", "process", "losses", "weights (sha256)"):
        found.add_column(column, justify="right" if column in ("rank", "process") else "left")
    for rank, one in enumerate(ranks):
        losses = " ".join(f"{loss:.4f}" for loss in one.losses)
        found.add_row(str(rank), str(one.process), losses, one.weights[:12])
    return found


def check_equal(title: str, ranks: "list[Rank]") -> None:
    """Raise RankError unless all ranks trained together, and have the losses and the weights of the first."""
    for rank, one in enumerate(ranks):
        if not one.losses:
            raise RankError(f"{title}: rank {rank} recorded no losses")
        if one.ranks != len(ranks):
            raise RankError(f"{title}: rank {rank} trained with {one.ranks} of {len(ranks)} ranks")
        if (one.losses, one.weights) != (ranks[0].losses, ranks[0].weights):
            raise RankError(f"{title}: rank {rank} has other losses or weights than rank 0")


def check_module(name: str) -> None:
    """ConfigError for a module that Python does not find."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(f"-m {name}", "there is no such module", "install it, or name a file without -m")


if __name__ == "__main__":
    run_command(app, RankError)
