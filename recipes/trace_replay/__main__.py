"""The command line: `python -m composer_plugins.recipes.trace_replay --help`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.errors import ComposerError, ConfigError
from composer_plugins.recipes.trace_replay.commands import app

NEEDS = {one: one for one in ("openai", "httpx2", "pyarrow")} | {"detect_secrets": "detect-secrets"}


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and status 2."""
    sys.path.insert(0, os.getcwd())  # where a judge may be
    try:
        if missing := [name for module, name in NEEDS.items() if find_spec(module) is None]:
            problem = f"it needs {', '.join(missing)}, which is not installed here"
            raise ConfigError("trace_replay", problem, "run pip install -e '.[trace-replay]' in a clone")
        app()
    except ComposerError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="An empty folder for what the demo makes.")] = Path("replay_demo"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of the training.")] = 10,
) -> None:
    """Recorded session -> states -> three scripted teachers over HTTP -> pairs -> TRL training."""
    from composer_plugins.recipes.trace_replay.demo import run_demo

    run_demo(out, steps)


if __name__ == "__main__":
    main()
