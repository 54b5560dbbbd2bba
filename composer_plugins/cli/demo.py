"""`composer-plugins demo`: a tiny model trained with verifiable reward, hints and replayed preferences."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

DEFAULT_CHANNELS, DEFAULT_SEEDS = ["rl", "rl+hint", "rl+replay", "rl+hint+replay"], ["0"]

DEMO_NEEDS = ("trl", "transformers", "datasets", "matplotlib")

LIVE_TEACHER = (
    "--teacher live: a teacher that moves with its student collapsed to reward 0 in 3 of 3 measured seeds, "
    "with and without RL"
)


def demo(
    channels: Annotated[
        list[str], typer.Option(help="Runs, by the channels each has on: rl, hint, replay, joined by +.")
    ] = DEFAULT_CHANNELS,
    seeds: Annotated[list[str], typer.Option(help="Seeds; every run is repeated with each.")] = DEFAULT_SEEDS,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 250,
    teacher: Annotated[str, typer.Option(help="The hint's teacher: base (frozen), ema or live.")] = "base",
    policy: Annotated[
        str, typer.Option(help="Policy loss: trl (TRL's own), or one of our losses: grpo, gspo, cispo ...")
    ] = "trl",
    out: Annotated[Path, typer.Option(help="Folder for results.json and curves.png.")] = Path("demo_out"),
) -> None:
    """Train a tiny model with verifiable reward, hints and replayed preferences, each on and off.

    Runs the codebook task through TRL's GRPOTrainer on the CPU; nothing is downloaded.
    --channels and --seeds take a list with commas, or may be repeated.
    """
    from composer_plugins.recipes.codebook import options
    from composer_plugins.recipes.shared import INTERRUPTED, check_installed, make_folder

    channel_sets, seed_list = options.parse_runs(channels), options.parse_seeds(seeds)
    settings = options.Settings(steps=steps, teacher=teacher, policy=policy)
    make_folder("--out", out)
    check_installed("demo", DEMO_NEEDS, "demo")

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
