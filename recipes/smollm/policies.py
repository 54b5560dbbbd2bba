"""`python -m composer_plugins.recipes.smollm.policies`: policy losses, with fresh and with older replies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.recipes.codebook import options
from composer_plugins.recipes.shared import INTERRUPTED, replace_file, run_command
from composer_plugins.recipes.smollm.__main__ import (
    RUNS,
    Device,
    Length,
    ModelName,
    Seeds,
    Steps,
    TaskName,
    console_of,
)

if TYPE_CHECKING:
    from composer_plugins.recipes.codebook.run import Run
    from composer_plugins.recipes.smollm.comparing import Comparison

POLICIES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "cispo@trl", "sapo", "dppo_tv", "gmpo", "vespo"]
PICTURE = "policies.png"
OLDEST = 16  # each step of age keeps a copy of the weights

Runs = Mapping[tuple[str, int], Sequence["Run"]]  # by policy and age, one for each seed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    policies: Annotated[list[str], typer.Option(help="Policy losses, with commas between them.")] = POLICIES,
    ages: Annotated[
        list[str], typer.Option(help="How many steps older the weights are that sample the replies.")
    ] = ["0,4"],  # noqa: B006
    seeds: Seeds = ["0,1"],  # noqa: B006
    steps: Steps = 40,
    task: TaskName = "arithmetic",
    model: ModelName = None,
    max_completion_length: Length = 14,
    out: Annotated[Path, typer.Option(help=f"Folder for {RUNS} and {PICTURE}.")] = Path("smollm_out"),
    device: Device = "cpu",
) -> None:
    """Train a language model with each policy loss, each with its own denominator and default parameters.

    Each run that has finished is a line of runs.jsonl, and is not repeated by the same command.
    """
    names, steps_old, numbers = parse_policies(policies), parse_ages(ages), options.parse_seeds(seeds)
    console = console_of(out)
    try:
        with console.status("loading PyTorch, TRL and the model"):
            from composer_plugins.recipes.smollm.asking import Settings
            from composer_plugins.recipes.smollm.comparing import Comparison

            settings = Settings(steps=steps, max_completion_length=max_completion_length)
            base = Comparison.prepared(task, model, device, settings, out / RUNS)
        runs = {
            key: one.trained([("rl",)], numbers, console)
            for key, one in each(base, names, steps_old, console)
        }
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    title = f"{base.name} on {base.task.name}, {steps} steps, {len(base.task.held_out)} held-out questions"
    console.print(table(runs, title))
    draw(runs, title, out)
    console.print(f"wrote {out / RUNS} and {out / PICTURE}", soft_wrap=True)


def each(
    base: "Comparison", names: list[str], ages: list[int], console: Console
) -> Iterator[tuple[tuple[str, int], "Comparison"]]:
    """Yield a comparison for each policy and age, and say which one it is."""
    for age in ages:
        for name in names:
            console.print(f"{name}, {title_of(age)}", soft_wrap=True)
            yield (name, age), replace(base, settings=replace(base.settings, policy=name, age=age))


def parse_policies(texts: Sequence[str]) -> list[str]:
    """``["grpo,gspo", "cispo@trl"]`` as names of policies, each of which has to exist."""
    names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))
    for name in names:
        try:
            ComposerConfig.parse({"policy": name})
        except ConfigError as error:
            raise ConfigError("--policies", error.problem, error.remedy) from None
    return names


def parse_ages(texts: Sequence[str]) -> list[int]:
    """``["0,4"]`` as numbers of steps."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) <= OLDEST):
            remedy = f"set whole numbers up to {OLDEST}: --ages 0,4"
            raise ConfigError("--ages", f"it has {word!r}", remedy)
    return list(dict.fromkeys(map(int, words)))


def title_of(age: int) -> str:
    """How a reader calls the replies of weights of this age."""
    return f"replies {age} steps old" if age else "on-policy"


def table(runs: Runs, title: str) -> Table:
    """The reward of the last steps, and the held-out accuracy after training: each seed, and the mean."""
    found = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("\nPolicy", no_wrap=True)
    ages = list(dict.fromkeys(age for _, age in runs))
    for age in ages:
        for header in (f"{title_of(age)}\nfinal", "\nafter", "\nmean"):
            found.add_column(header, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for name, _ in runs):
        cells = [name]
        for age in ages:
            after = [run.greedy_after for run in runs[name, age]]
            cells += [f"{fmean(run.final_reward for run in runs[name, age]):.2f}"]
            cells += [" ".join(f"{one:.2f}" for one in after), f"{fmean(after):.2f}"]
        found.add_row(*cells)
    return found


def draw(runs: Runs, title: str, folder: Path) -> None:
    """Write the picture: a panel for each age, and a line for each policy, the mean of its seeds."""
    from composer_plugins.plotting import drawing
    from composer_plugins.plotting.data import Panel, Picture, Series
    from composer_plugins.recipes.codebook.curves import smooth
    from composer_plugins.recipes.codebook.run import FINAL_STEPS

    panels = []
    for age in dict.fromkeys(age for _, age in runs):
        lines = []
        for name in dict.fromkeys(name for name, _ in runs):
            curves = [smooth(run.rewards) for run in runs[name, age]]
            mean = tuple(fmean(rewards) for rewards in zip(*curves, strict=True))
            lines.append(Series(name, tuple(range(1, len(mean) + 1)), mean))
        panels.append(Panel(title_of(age), "optimizer step", "share of right replies", tuple(lines)))
    seeds = len(next(iter(runs.values())))
    note = f"means over the last {FINAL_STEPS} steps and over {seeds} {'seeds' if seeds > 1 else 'seed'}"
    figure = drawing.draw(Picture(tuple(panels), len(panels), (note,), title))
    replace_file(folder / PICTURE, lambda path: figure.savefig(path, format="png", dpi=160))


if __name__ == "__main__":
    run_command(app)
