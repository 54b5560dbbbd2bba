"""All runs of a command: those of earlier commands are read from a file, and the others are trained."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
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
from composer_plugins.recipes.smollm.tasks import Row, Task, make_task
from composer_plugins.recipes.tiny import quiet_libraries


@dataclass
class Comparison:
    """A model on a task, and the file of its runs."""

    name: str  # of the model
    start: Loaded
    task: Task
    settings: Settings
    file: Path
    paired: dict[int, list[Row]] = field(default_factory=dict)  # the rows with pairs, by their seed

    @classmethod
    def prepared(
        cls, task: str, model: str | None, device: str, settings: Settings, file: Path
    ) -> "Comparison":
        """Make the task and load the model."""
        made = make_task(task)
        with quiet_libraries():
            return cls(model or "SmolLM2-135M-Instruct", load(model, device), made, settings, file)

    def run(self, policy: str, sets: Sequence[Channels], seeds: Sequence[int], console: Console) -> None:
        """Train what the file does not have with this policy loss, print the table, and draw the curves."""
        runs = self.trained(policy, sets, seeds, console)
        title = f"{self.name} on {self.task.name}, {policy}, {len(self.task.held_out)} held-out questions"
        console.print(results_table(runs, title, draws_bars=not console.options.ascii_only))
        folder = self.file.parent / policy
        folder.mkdir(exist_ok=True)
        axis = Axis(f"{self.name} on {self.task.name}, {policy}", "reward: share of replies that are right")
        draw_curves(folder, runs, axis)
        console.print(f"wrote {self.file} and {folder / CURVES_FILE}", soft_wrap=True)

    def trained(
        self, policy: str, sets: Sequence[Channels], seeds: Sequence[int], console: Console
    ) -> list[Run]:
        """The runs with these channels and seeds; those that the file does not have are trained now."""
        settings = replace(self.settings, policy=policy)
        plan = [(channels, seed) for seed in seeds for channels in sets]
        done = {(run.channels, run.seed): run for run in self.finished(settings)}
        rest = [one for one in plan if one not in done]
        if len(rest) < len(plan):
            console.print(f"{len(plan) - len(rest)} of {len(plan)} runs are in {self.file}", soft_wrap=True)
        if rest:
            with quiet_libraries(), Progress(rest, settings.steps, console) as progress:
                for index, (channels, seed) in enumerate(rest):
                    before, rows = self.before, self.rows(channels, seed)
                    progress.start(index)
                    run = train(channels, seed, self.start, self.task, rows, settings, before, progress.step)
                    done[channels, seed] = run
                    self.save(run, settings)
        return [done[one] for one in plan]

    @cached_property
    def before(self) -> float:
        """The accuracy of the model before training."""
        return accuracy(self.start, self.task, self.settings)

    def rows(self, channels: Channels, seed: int) -> list[Row]:
        """The rows of a run; they have pairs if the replay channel is on."""
        if "replay" not in channels:
            return [*self.task.rows]
        if seed not in self.paired:
            self.paired[seed] = with_pairs(self.start, self.task, self.settings, seed)
        return self.paired[seed]

    def conditions(self, settings: Settings) -> dict[str, Any]:
        """What a run of the file must have in common with one of this comparison."""
        return {"model": self.name, "task": self.task.name, **asdict(settings)}

    def finished(self, settings: Settings) -> Iterator[Run]:
        """Yield the runs of the file that have the same model, task and settings."""
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            line = json.loads(text)
            if line["conditions"] == self.conditions(settings):
                yield Run(**{**line["run"], "channels": tuple(line["run"]["channels"])})

    def save(self, run: Run, settings: Settings) -> None:
        """Append a run to the file."""
        line = {"conditions": self.conditions(settings), "channels": key_of(run.channels), "run": asdict(run)}
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")
