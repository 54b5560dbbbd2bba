"""The command line. Torch and the frameworks are imported only by the commands that need them."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins import __version__
from composer_plugins.cli.doctor import doctor
from composer_plugins.cli.migrate import migrate
from composer_plugins.errors import ComposerError, ConfigError

if TYPE_CHECKING:
    from composer_plugins.plugins import Problem, Registry

app = typer.Typer(
    name="composer-plugins",
    help="RL losses, written once as a loss per token, for TRL, verl and PRIME-RL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits it
)

DEFAULT_CHANNELS, DEFAULT_SEEDS = ["rl,rl+hint,rl+replay,rl+hint+replay"], ["0"]

DEMO_NEEDS = ("trl", "transformers", "datasets", "matplotlib")
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended: 128 + SIGINT

LIVE_TEACHER = (
    "--teacher live: a teacher that moves with its student collapsed to reward 0 in 3 of 3 measured seeds, "
    "with and without RL"
)


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and status 2."""
    sys.path.insert(0, os.getcwd())  # import paths are then found as by `python -m composer_plugins`
    try:
        app()
    except ComposerError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)


def print_version(wanted: bool) -> None:
    """Answer `--version` before anything else is looked at."""
    if wanted:
        typer.echo(f"composer-plugins {__version__}")
        raise typer.Exit


@app.callback()
def options_before_the_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command("list")
def list_losses(
    kind: Annotated[
        str | None, typer.Option(help="Only this kind: policy, advantage, divergence ...")
    ] = None,
    needs: Annotated[str | None, typer.Option(help="Only losses with this input: ref_logprobs ...")] = None,
    framework: Annotated[
        str | None, typer.Option(help="Only losses that this framework's adapter can run: trl ...")
    ] = None,
    dialects_of: Annotated[
        str | None, typer.Option(help="Only the dialects of this upstream: trl, verl, verl<0.9 ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every parameter.")] = False,
) -> None:
    """List every loss and dialect, with its source and the test that proves it.

    A fault of an installed plugin is printed to stderr, and the exit status is then 1.
    """
    from composer_plugins.cli import listing

    registry = _registry()
    rows = listing.select(registry, kind, needs, framework, dialects_of)
    if as_json:
        typer.echo(json.dumps(listing.as_data(registry, rows), indent=2))
    else:
        with _page() as console:
            listing.print_tables(console, registry, rows)
    if registry.problems:
        raise typer.Exit(1)


@app.command()
def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A loss (cispo), a dialect (cispo@trl), or an import path (my_package.losses:my_loss)."
        ),
    ],
    kind: Annotated[
        str | None, typer.Option(help="The kind, where two kinds share the name: policy, advantage ...")
    ] = None,
) -> None:
    """Show a loss: formula, paper, parameters, and its dialects with the numbers they give.

    A kernel that fails on the example is reported on stderr, and the exit status is then 1.
    """
    from composer_plugins.cli import explaining

    registry = _registry()
    problems = []
    with _page() as console:
        for i, (loss, dialect) in enumerate(explaining.find(registry, name, kind)):
            if i:
                console.rule()
            problems.append(explaining.print_page(console, registry, loss, dialect))
    if failed := [problem for problem in problems if problem]:
        _complain(failed)
        raise typer.Exit(1)


def _registry() -> "Registry":
    """Everything installed; the faults of plugins are printed to stderr."""
    from composer_plugins.plugins import collect, get_plugin_manager

    registry = collect(get_plugin_manager())
    _complain(registry.problems)
    return registry


def _complain(problems: "Iterable[Problem]") -> None:
    for problem in problems:
        Console(stderr=True).print(Text(f"error: {problem}", style="red"), soft_wrap=True)


@contextmanager
def _page() -> Iterator[Console]:
    """A console for tables, as wide as the terminal, or 200 columns where there is none.

    Trailing blanks, which fill the last column of a table, are removed.
    """
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    console = Console(highlight=False, markup=False, emoji=False, width=wide)
    with console.capture() as capture:
        yield console
    typer.echo("\n".join(line.rstrip(" ") for line in capture.get().split("\n")), nl=False)


app.command()(doctor)
app.command()(migrate)


@app.command()
def demo(
    channels: Annotated[
        list[str], typer.Option(help="Runs, by the channels each has on: rl, hint, replay, joined by +.")
    ] = DEFAULT_CHANNELS,
    seeds: Annotated[list[str], typer.Option(help="Seeds; every run is repeated with each.")] = DEFAULT_SEEDS,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 250,
    teacher: Annotated[str, typer.Option(help="The hint's teacher: base (frozen), ema or live.")] = "base",
    policy: Annotated[
        str, typer.Option(help="Policy loss: trl (TRL's own), or one of ours: grpo, gspo, cispo ...")
    ] = "trl",
    out: Annotated[Path, typer.Option(help="Folder for results.json and curves.png.")] = Path("demo_out"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; this model is fastest with one.")] = 1,
) -> None:
    """Train a tiny model with verifiable reward, hints and replayed preferences, each on and off.

    Runs the codebook task through TRL's GRPOTrainer on the CPU; nothing is downloaded.
    --channels and --seeds take a list with commas, or may be repeated.
    """
    from composer_plugins.recipes.codebook import options

    channel_sets, seed_list = options.parse_runs(channels), options.parse_seeds(seeds)
    settings = options.Settings(steps=steps, teacher=teacher, policy=policy, threads=threads)
    options.make_folder(out)
    missing = [name for name in DEMO_NEEDS if find_spec(name) is None]
    if missing:
        problem = f"it needs {', '.join(missing)}, which is not installed here"
        raise ConfigError("demo", problem, "run pip install -e '.[demo]' in a clone")

    console = Console(highlight=False, markup=False, emoji=False)  # a folder may be named [x] or :x:
    if teacher == "live" and any("hint" in one for one in channel_sets):
        console.print(Text(f"warning: {LIVE_TEACHER}", style="yellow"), soft_wrap=True)
    # Read when the Hugging Face libraries are imported. The model is made here, so no hub is needed.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    try:
        with console.status("loading PyTorch and TRL"):
            from composer_plugins.recipes.codebook.demo import run_demo
        run_demo(channel_sets, seed_list, settings, out, console)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
