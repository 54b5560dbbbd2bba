"""`composer-plugins demo`: train the codebook task with each set of channels, one run after the other."""

from pathlib import Path

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

    Those that have finished are kept, and printed, if Ctrl-C or an error ends the command.
    """
    plan = [(channels, seed) for seed in seeds for channels in channel_sets]
    with quiet_libraries():
        for channels, seed in plan:  # an error of the config comes before the first run
            trainer_config(channels, seed, settings, output_dir=str(folder))
    runs: list[Run] = []
    try:
        with quiet_libraries(), Progress(plan, settings.steps, console) as progress:
            start = None
            for index, (channels, seed) in enumerate(plan):
                if start is None or start.seed != seed:
                    progress.warm_up(seed)
                    start = make_start(seed)
                progress.start(index)
                runs.append(train(channels, start, settings, progress.step))
                save(runs, settings, folder)
    finally:
        if runs:
            save(runs, settings, folder)  # once more: the last of them may not have been saved
            console.print(results_table(runs, draws_bars=not console.options.ascii_only))
            console.print(f"wrote {folder / RESULTS_FILE} and {folder / CURVES_FILE}", soft_wrap=True)
        if len(runs) < len(plan):
            console.print(f"interrupted: {len(runs)} of {len(plan)} runs had finished")


def save(runs: list[Run], settings: Settings, folder: Path) -> None:
    """Write both files."""
    write_results(folder, runs, settings)
    draw_curves(folder, runs)
