"""The results of a demo: results.json, and the table that it prints at the end."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
import trl
from rich.box import SIMPLE_HEAD
from rich.table import Table

import composer_plugins
from composer_plugins.recipes.codebook.options import RESULTS_FILE, Settings, key_of, title_of
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.shared import replace_file

BARS, CURVE_WIDTH = "▁▂▃▄▅▆▇█", 14

NUMBERS = ("start_reward", "final_reward", "greedy_before", "greedy_after")  # of a run


def results(runs: Sequence[Run], settings: Settings) -> dict[str, Any]:
    """The content of results.json. It has no paths, dates or names of machines; times are under "timing"."""
    return {
        "settings": asdict(settings),
        "versions": {
            package.__name__: package.__version__ for package in (composer_plugins, torch, transformers, trl)
        },
        "runs": [
            {
                "channels": key_of(run.channels),
                "seed": run.seed,
                **{name: round(getattr(run, name), 6) for name in NUMBERS},
                "rewards": [round(reward, 6) for reward in run.rewards],
            }
            for run in runs
        ],
        "timing": {"run_seconds": [round(run.seconds, 2) for run in runs]},
    }


def write_results(folder: Path, runs: Sequence[Run], settings: Settings) -> None:
    """Write results.json."""
    text = json.dumps(results(runs, settings), indent=1) + "\n"
    replace_file(folder / RESULTS_FILE, lambda path: path.write_text(text))


def sparkline(rewards: Sequence[float]) -> str:
    """Rewards in [0, 1] as a line of bars."""
    width = min(CURVE_WIDTH, len(rewards))
    edges = [i * len(rewards) // width for i in range(width + 1)]
    means = [fmean(rewards[start:end]) for start, end in pairwise(edges)]
    return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)


def results_table(runs: Sequence[Run], what: str = "codebook task", *, draws_bars: bool) -> Table:
    """The table that a demo prints at the end. It fits 80 columns."""
    several_seeds = any(run.seed != runs[0].seed for run in runs)
    title = f"What each channel of the loss adds: {what}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\nChannels", no_wrap=True)
    headers = ["\nSeed"] if several_seeds else []
    headers += ["Reward\nstart", "\nfinal"] + (["\nover the steps"] if draws_bars else [])
    for header in [*headers, "Greedy\nbefore", "\nafter", "\nTime"]:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        cells = [title_of(run.channels)]
        cells += [str(run.seed)] if several_seeds else []
        cells += [f"{run.start_reward:.2f}", f"{run.final_reward:.2f}"]
        cells += [sparkline(run.rewards)] if draws_bars else []
        cells += [f"{run.greedy_before:.2f}", f"{run.greedy_after:.2f}", f"{run.seconds:.0f} s"]
        table.add_row(*cells)
    return table
