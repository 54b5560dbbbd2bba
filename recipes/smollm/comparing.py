"""All runs of a command: those of earlier commands are read from a file, and the others are trained."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_plugins.recipes.codebook.curves import Axis, draw_curves
from composer_plugins.recipes.codebook.options import CURVES_FILE, Channels, key_of
from composer_plugins.recipes.codebook.progress import Progress
from composer_plugins.recipes.codebook.report import results_table
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.smollm.asking import Settings, accuracy, with_pairs
from composer_plugins.recipes.smollm.model import Loaded, load
from composer_plugins.recipes.smollm.run import train
from composer_plugins.recipes.smollm.tasks import WORKED, Row, Task, make_task
from composer_plugins.recipes.tiny import quiet_libraries

DIGITS = 6  # of a number in the file


@dataclass(frozen=True)
class Comparison:
    """A model on a task, and the file of its runs."""

    name: str  # of the model
    start: Loaded
    task: Task
    settings: Settings
    file: Path

    @classmethod
    def prepared(
        cls, task: str, model: str | None, device: str, settings: Settings, file: Path
    ) -> "Comparison":
        """Make the task and load the model."""
        made = make_task(task)
        with quiet_libraries():
            return cls(model or "SmolLM2-135M-Instruct", load(model, device), made, settings, file)

    def run(self, sets: list[Channels], seeds: list[int], folder: Path, console: Console) -> None:
        """Train what the file does not have, and print the table and draw the curves of all."""
        runs = self.trained(sets, seeds, console)
        title = f"{self.name} on {self.task.name}, {len(self.task.held_out)} held-out questions"
        console.print(results_table(runs, title, draws_bars=not console.options.ascii_only))
        axis = Axis(f"{self.name} on {self.task.name}", "reward: share of replies that are right")
        draw_curves(folder, runs, axis)
        console.print(f"wrote {self.file} and {folder / CURVES_FILE}", soft_wrap=True)

    def trained(self, sets: list[Channels], seeds: list[int], console: Console) -> list[Run]:
        """The runs with these channels and seeds; those that the file does not have are trained now."""
        plan = [(channels, seed) for seed in seeds for channels in sets]
        done = {(run.channels, run.seed): run for run in self.finished()}
        rest = [one for one in plan if one not in done]
        if len(rest) < len(plan):
            console.print(f"{len(plan) - len(rest)} of {len(plan)} runs are in {self.file}", soft_wrap=True)
        if rest:
            with quiet_libraries(), Progress(rest, self.settings.steps, console) as progress:
                before, pairs = self.accuracy_before(), dict[int, list[Row]]()
                for index, (channels, seed) in enumerate(rest):
                    if seed not in pairs and "replay" in channels:
                        pairs[seed] = with_pairs(self.start, self.task, self.settings, seed)
                    rows = pairs[seed] if "replay" in channels else [*self.task.rows]
                    progress.start(index)
                    made = train(
                        channels, seed, self.start, self.task, rows, self.settings, before, progress.step
                    )
                    done[channels, seed] = made
                    self.save(made)
        return [done[one] for one in plan]

    def accuracy_before(self) -> float:
        """The accuracy of the model before training, from the file if it has a run on this task."""
        length = self.settings.max_completion_length
        asked = {"model": self.name, "task": self.task.name, "max_completion_length": length}
        for line in self.lines():
            if asked.items() <= line["conditions"].items():
                return float(line["run"]["greedy_before"])
        return accuracy(self.start, self.task, self.settings)

    def conditions(self) -> dict[str, Any]:
        """What a run of the file must have in common with this comparison."""
        return {"model": self.name, "task": self.task.name, **asdict(self.settings)}

    def finished(self) -> Iterator[Run]:
        """Yield the runs of the file that have the same model, task and settings."""
        for line in self.lines():
            channels = tuple(line["run"]["channels"])
            # A line without hints is older than --hints, and one without an age is older than --ages.
            if {"hints": WORKED, "age": 0, **line["conditions"]} == self.conditions():
                yield Run(**{**line["run"], "channels": channels})

    def lines(self) -> list[Any]:
        """The lines of the file, each a run with its conditions."""
        return [*map(json.loads, self.file.read_text().splitlines())] if self.file.exists() else []

    def save(self, run: Run) -> None:
        """Append a run to the file."""
        numbers = {name: rounded(value) for name, value in asdict(run).items()}
        line = {"conditions": self.conditions(), "channels": key_of(run.channels), "run": numbers}
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def rounded(value: Any) -> Any:
    """A number, or each of a list, with as many digits as the file has."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, DIGITS) if isinstance(value, float) else value
