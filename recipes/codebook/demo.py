"""`composer-plugins demo`: train the codebook task with each set of channels, one run after the other."""

from pathlib import Path

import torch
from rich.console import Console

from composer_plugins.recipes.codebook.curves import draw_curves
from composer_plugins.recipes.codebook.options import CURVES_FILE, RESULTS_FILE, Channels, Settings
from composer_plugins.recipes.codebook.progress import Progress
from composer_plugins.recipes.codebook.report import results_table, write_results
from composer_plugins.recipes.codebook.run import Run, make_start, train, trainer_config
from composer_plugins.recipes.tiny import quiet_libraries


def run_demo(
    channel_sets: list[Channels], seeds: list[int], settings: Settings, folder: Path, console: Console
) -> None:
    """Run each set of channels with each seed; after every run, both files contain all runs so far.

    On Ctrl-C it prints what is kept, and raises KeyboardInterrupt again.
    """
    torch.set_num_threads(settings.threads)
    plan = [(channels, seed) for seed in seeds for channels in channel_sets]
    runs: list[Run] = []
    try:
        with quiet_libraries(), Progress(plan, settings.steps, console) as progress:
            for channels, seed in plan:  # an error of the config comes before the first run
                trainer_config(channels, seed, settings, output_dir=str(folder))
            start = None
            for index, (channels, seed) in enumerate(plan):
                if start is None or start.seed != seed:
                    progress.warm_up(seed)
                    start = make_start(seed)
                progress.start(index)
                runs.append(train(channels, start, settings, progress.step))
                save(runs, settings, folder)
    except KeyboardInterrupt:
        if not runs:
            console.print("interrupted before the first run had finished: nothing was written")
            raise
        save(runs, settings, folder)  # once more: the last of them may have finished and not been saved
        console.print(results_table(runs, draws_bars=not console.options.ascii_only))
        console.print(
            f"interrupted: {folder / RESULTS_FILE} and {folder / CURVES_FILE} contain "
            f"the {len(runs)} of {len(plan)} runs that had finished",
            soft_wrap=True,
        )
        raise
    console.print(results_table(runs, draws_bars=not console.options.ascii_only))
    console.print(f"wrote {folder / RESULTS_FILE} and {folder / CURVES_FILE}", soft_wrap=True)


def save(runs: list[Run], settings: Settings, folder: Path) -> None:
    """Write both files."""
    write_results(folder, runs, settings)
    draw_curves(folder, runs)
