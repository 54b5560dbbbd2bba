"""The command line: `python -m composer_plugins.recipes.trace_replay --help`."""

from pathlib import Path
from typing import Annotated

import typer

from composer_plugins.recipes.shared import run_command
from composer_plugins.recipes.trace_replay.commands import app


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="An empty folder for what the demo makes.")] = Path("replay_demo"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of the training.")] = 10,
) -> None:
    """Recorded session -> states -> three scripted teachers over HTTP -> pairs -> TRL training."""
    from composer_plugins.recipes.trace_replay.demo import run_demo

    run_demo(out, steps)


if __name__ == "__main__":
    run_command(app)
