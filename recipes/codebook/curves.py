"""The picture of the reward curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import CURVES_FILE, Channels, title_of
from composer_plugins.recipes.codebook.run import FINAL_STEPS, Run
from composer_plugins.recipes.shared import replace_file

# The colours of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS: dict[Channels, str] = {
    ("rl",): "#555555",
    ("rl", "hint"): "#0072B2",
    ("rl", "replay"): "#D55E00",
    ("rl", "hint", "replay"): "#009E73",
    ("hint",): "#56B4E9",
    ("replay",): "#E69F00",
    ("hint", "replay"): "#CC79A7",
}


class Axis(NamedTuple):
    """The words of the picture, and the reward of guessing."""

    task: str
    reward: str
    guessing: float | None = None


CODEBOOK = Axis("codebook task", "reward: fraction of digits that are right", 1 / len(task.DIGITS))


def draw_curves(folder: Path, runs: Sequence[Run], axis: Axis = CODEBOOK) -> None:
    """Write curves.png: a thick line for each set of channels, the mean of its seeds."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    steps = len(runs[0].rewards)
    if axis.guessing is not None:
        axes.axhline(axis.guessing, color="#8a8a8a", linewidth=1, linestyle=(0, (2, 3)), label="guessing")
    for channels in dict.fromkeys(run.channels for run in runs):
        colour = COLOURS[channels]
        curves = [run.rewards for run in runs if run.channels == channels]
        smoothed = [smooth(curve) for curve in curves]
        for faint in smoothed if len(curves) > 1 else curves:
            axes.plot(range(1, steps + 1), faint, color=colour, alpha=0.25, linewidth=0.9)
        mean = [sum(rewards) / len(rewards) for rewards in zip(*smoothed, strict=True)]
        label = f"{title_of(channels)}  {mean[-1]:.2f}"
        axes.plot(range(1, steps + 1), mean, color=colour, linewidth=2.5, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), labelcolor="linecolor", frameon=False)
    describe(axes, axis, steps, [run.seed for run in runs])
    replace_file(folder / CURVES_FILE, lambda path: figure.savefig(path, format="png", dpi=160))


def smooth(rewards: Sequence[float]) -> list[float]:
    """The mean of the last steps at each step, so that a line ends at its run's final reward."""
    parts = [rewards[max(0, i + 1 - FINAL_STEPS) : i + 1] for i in range(len(rewards))]
    return [sum(part) / len(part) for part in parts]


def describe(axes: Axes, axis: Axis, steps: int, seeds: Sequence[int]) -> None:
    """Title, axes, and the level of guessing."""
    several_seeds = any(seed != seeds[0] for seed in seeds)
    lines = (
        f"thick: mean of {len(dict.fromkeys(seeds))} seeds; thin: each seed (means over {FINAL_STEPS} steps)"
        if several_seeds
        else f"thick: mean over {FINAL_STEPS} steps; faint: each step (seed {seeds[0]})"
    )
    axes.set_title(
        "Reward while training, by the channels of the loss that are on", loc="left", pad=26, weight="bold"
    )
    axes.text(0, 1.03, f"{axis.task}, TRL's GRPOTrainer; {lines}", transform=axes.transAxes, color="#555555")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(axis.reward)
    axes.set_xlim(1, max(2, steps))
    axes.set_ylim(0, 1.015)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
