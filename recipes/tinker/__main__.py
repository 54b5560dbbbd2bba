"""`python -m composer_plugins.recipes.tinker`: three channels over HTTP, on this CPU."""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.codebook.options import parse_run
from composer_plugins.recipes.shared import HELP_OPTIONS, run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    channels: Annotated[str, typer.Option(help="rl, hint and replay, joined by +.")] = "rl+hint+replay",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the codebook, the model and the completions.")] = 0,
) -> None:
    """Start SkyRL's Tinker-compatible server with a tiny model, and train it with Tinker's SDK."""
    names = parse_run(channels)
    if missing := [one for one in ("tinker", "skyrl", "jax", "flax") if find_spec(one) is None]:
        raise ConfigError("recipes.tinker", f"it needs {', '.join(missing)}", "run make recipe-tinker")
    import torch

    from composer_plugins.recipes.codebook import task
    from composer_plugins.recipes.tinker.run import COMPLETIONS, LETTERS, Trainer
    from composer_plugins.recipes.tinker.server import served
    from composer_plugins.recipes.tiny_model import make_model

    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        torch.manual_seed(seed)
        tokenizer = task.make_tokenizer()
        model = make_model(tokenizer, positions=64)
        task.warm_up(model, tokenizer, seed)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        console.print(f"a model of {model.num_parameters()} parameters, {time.monotonic() - start:.0f} s")
        with served(folder / "model", folder, sequences=len(LETTERS) * COMPLETIONS) as url:
            console.print(f"the server answers, {time.monotonic() - start:.0f} s")
            trainer = Trainer(url, str(folder / "model"), names, seed=seed)
            for step in range(steps):
                reward, metrics = trainer.step(step)
                terms = ", ".join(
                    f"{name.removeprefix('composer/').removesuffix('/loss')} {x:.6f}"
                    for name, x in metrics.items()
                    if name.endswith("/loss") and name != "composer/loss"
                )
                total, seconds = metrics["composer/loss"], time.monotonic() - start
                console.print(
                    f"step {step}: reward {reward:.4f}, loss {total:.6f} ({terms}), {seconds:.0f} s"
                )


if __name__ == "__main__":
    run_command(app)
