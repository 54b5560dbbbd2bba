"""The picture and the table of the gallery, from benchmarks/gallery.json alone."""

import json
import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from docs.generator.markdown import table
from docs.generator.written import END, ROOT

RESULTS, PICTURE = ROOT / "benchmarks" / "gallery.json", ROOT / "docs" / "gallery.png"
PAGE, MARK = ROOT / "benchmarks" / "README.md", "<!-- table: gallery -->\n"

# Colours of Okabe and Ito, which colour-blind readers can distinguish. Noise is dashed.
SETTINGS = {
    "on-policy": ("#0072B2", "-"),
    "on-policy, noise": ("#56B4E9", (0, (2, 1))),
    "4 steps off": ("#D55E00", "-"),
    "4 steps off, noise": ("#E69F00", (0, (2, 1))),
}
COLOURS = 96  # of the file, which is then a third as large
COLUMNS, LAST = 6, 3  # panels in a row; the final reward is a mean over so many of the last scores

Curves = Sequence[Sequence[float]]  # of each seed


class Final(NamedTuple):
    """The final reward of a loss in a setting: the mean over seeds, and the least and the largest."""

    mean: float
    low: float
    high: float


def load() -> dict[str, Any]:
    """The results."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    return results


def save(results: dict[str, Any]) -> None:
    """Write the results; the curve of a seed is one line."""
    for loss in results["losses"].values():
        loss["rewards"] = {name: loss["rewards"][name] for name in SETTINGS if name in loss["rewards"]}
    text = json.dumps({**results, "losses": dict(sorted(results["losses"].items()))}, indent=1)
    RESULTS.write_text(re.sub(r"\[([^][]+)\]", lambda curve: f"[{' '.join(curve[1].split())}]", text) + "\n")


def final(curves: Curves) -> Final:
    """The mean of the last scores of each seed, over seeds."""
    ends = [fmean(curve[-LAST:]) for curve in curves]
    return Final(fmean(ends), min(ends), max(ends))


def rows(results: dict[str, Any]) -> str:
    """The table of the final rewards."""
    body = []
    for name, loss in sorted(results["losses"].items()):
        values = ", ".join(f"{key}={value:g}" for key, value in loss["parameters"].items())
        ends = [final(loss["rewards"][setting]) for setting in SETTINGS]
        cells = [f"{end.mean:.2f} ({end.low:.2f} to {end.high:.2f})" for end in ends]
        body.append((f"`{name}`" + (f" with {values}" if values else ""), *cells))
    return table(("loss", *SETTINGS), body)


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(MARK)
    return before + MARK + rows(results) + END + rest.partition(END)[2]


def draw() -> None:
    """Draw the picture, and write the table into its page."""
    results = load()
    PAGE.write_text(filled(PAGE.read_text(), results))
    picture(results, PICTURE)


def picture(results: dict[str, Any], path: Path) -> None:
    """A panel for each loss, and the legend above them. Its ground is light, so it is readable on any."""
    losses = dict(sorted(results["losses"].items()))
    lines = math.ceil(len(losses) / COLUMNS)
    figure = Figure(figsize=(11, 1.6 * lines + 1), layout="constrained", facecolor="#fbfbfd")
    panels = [*figure.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flat]
    for axes in panels:
        axes.set_visible(False)
    for axes, (name, loss) in zip(panels, losses.items(), strict=False):
        axes.set_visible(True)
        _panel(axes, name, loss["rewards"], results["scored every"])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(SETTINGS), frameon=False, fontsize=12
    )
    figure.supxlabel(f"optimizer step (of {results['updates']})", fontsize=11)
    figure.supylabel("reward without noise; a line is the mean of 3 seeds, a band their range", fontsize=11)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _panel(axes: Axes, name: str, rewards: dict[str, Curves], every: int) -> None:
    axes.set_title(name, fontsize=10, pad=3)
    for setting, (colour, style) in SETTINGS.items():
        points = [*zip(*rewards[setting], strict=True)]
        steps = [every * i for i in range(len(points))]
        axes.fill_between(
            steps, [*map(min, points)], [*map(max, points)], color=colour, alpha=0.13, linewidth=0
        )
        axes.plot(steps, [*map(fmean, points)], color=colour, linestyle=style, linewidth=1.4, label=setting)
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(0, 1)
    axes.set_xticks([0, steps[-1] // 2])
    axes.set_yticks([0, 0.5, 1])
    axes.grid(color="#e3e3ea", linewidth=0.7)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
