"""The progress of a demo: bars on a terminal, plain lines anywhere else."""

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from composer_plugins.recipes.codebook.options import Channels, title_of

PLAIN_LINES_PER_RUN = 5

# What each channel adds to the time of a step; a step of RL alone takes 1 (measured).
HINT_COST, REPLAY_COST = 0.5, 1.0


class Progress:
    """Shows the planned runs in their order, and all of them together. As a context manager it shows bars."""

    def __init__(self, plan: list[tuple[Channels, int]], steps: int, console: Console) -> None:
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self.bars = Bars(*columns, *times, console=console, transient=True, disable=not can_redraw)
        several_seeds = len({seed for _, seed in plan}) > 1
        for channels, seed in plan:
            name = title_of(channels) + (f", seed {seed}" if several_seeds else "")
            self.bars.add_task(name, total=steps, start=False, text="")
        self.costs = [
            1.0 + HINT_COST * ("hint" in channels) + REPLAY_COST * ("replay" in channels)
            for channels, _ in plan
        ]
        self.all = self.bars.add_task("all runs", total=sum(self.costs) * steps, text="")
        self.steps, self.current = steps, self.bars.tasks[0]

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def warm_up(self, seed: int) -> None:
        """The warm-up of a new seed's model begins."""
        text = f"seed {seed}: warming up the model (it learns the format, and no answer)"
        self.bars.update(self.all, text=text)
        if self.bars.disable:
            self.bars.console.print(text)

    def start(self, index: int) -> None:
        """The planned run `index` begins."""
        self.current = self.bars.tasks[index]
        self.bars.start_task(self.current.id)
        self.bars.update(self.all, text="")

    def step(self, step: int, reward: float) -> None:
        """A step of the current run is done."""
        text = f"step {step} of {self.steps}, reward {reward:.2f}"
        self.bars.update(self.current.id, completed=step, text=text)
        self.bars.advance(self.all, self.costs[self.current.id])
        if self.bars.disable and step * PLAIN_LINES_PER_RUN % self.steps < PLAIN_LINES_PER_RUN:
            seconds = self.bars.tasks[self.all].time_remaining
            left = "" if seconds is None else f", {timedelta(seconds=round(seconds))} left"
            self.bars.console.print(f"{self.current.description}: {text}{left}")
