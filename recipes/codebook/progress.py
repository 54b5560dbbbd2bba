"""The progress of a demo: a live table on a terminal, plain lines anywhere else."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from composer_plugins.recipes.codebook.options import Channels, title_of

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 24
PLAIN_LINES_PER_RUN = 5

# What each channel adds to the time of a step; a step of RL alone takes 1 (measured).
HINT_COST, REPLAY_COST = 0.5, 1.0


def sparkline(rewards: list[float], steps: int, width: int) -> str:
    """Rewards in [0, 1] as a line of bars, as long as `width` when `steps` are done."""
    width = min(width, steps)
    cells = [rewards[i * steps // width : (i + 1) * steps // width] for i in range(width)]
    means = [sum(cell) / len(cell) for cell in cells if cell]
    return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)


class Progress:
    """Shows the planned runs in their order. As a context manager it shows the live table."""

    def __init__(self, plan: list[tuple[Channels, int]], steps: int, console: Console) -> None:
        self.plan, self.steps, self.console = plan, steps, console
        self.rewards: list[list[float]] = [[] for _ in plan]
        self.seconds = [0.0] * len(plan)
        self.current = 0
        self.phase = ""
        self.run_began = 0.0
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        draws_bars = not console.options.ascii_only
        self.live = (
            Live(get_renderable=self.picture, console=console, refresh_per_second=5, transient=True)
            if can_redraw and draws_bars
            else None
        )

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def warm_up(self, seed: int) -> None:
        """The warm-up of a new seed's model begins."""
        self.phase = f"seed {seed}: warming up the model (it learns the format, and no answer)"
        if not self.live:
            self.console.print(self.phase)

    def start(self, index: int) -> None:
        """The planned run `index` begins."""
        self.current, self.phase, self.run_began = index, "", time.perf_counter()

    def step(self, step: int, reward: float) -> None:
        """A step of the current run is done."""
        self.rewards[self.current].append(reward)
        self.seconds[self.current] = time.perf_counter() - self.run_began
        if not self.live and step * PLAIN_LINES_PER_RUN % self.steps < PLAIN_LINES_PER_RUN:
            name, left = self.name(self.current), self.time_left()
            self.console.print(f"{name}: step {step} of {self.steps}, reward {reward:.2f}, {left}")

    def name(self, index: int) -> str:
        """The name of a planned run in the table."""
        channels, seed = self.plan[index]
        several_seeds = any(other != seed for _, other in self.plan)
        return title_of(channels) + (f", seed {seed}" if several_seeds else "")

    def time_left(self) -> str:
        """The time that the remaining steps take at the speed of the finished ones."""
        costs = [
            1.0 + HINT_COST * ("hint" in channels) + REPLAY_COST * ("replay" in channels)
            for channels, _ in self.plan
        ]
        done = sum(cost * len(rewards) for cost, rewards in zip(costs, self.rewards, strict=True))
        if not done:
            return ""
        left = sum(costs) * self.steps - done
        minutes, seconds = divmod(round(sum(self.seconds) * left / done), 60)
        return f"{minutes} min {seconds} s left" if minutes else f"{seconds} s left"

    def picture(self) -> Group:
        """The live table: a row for each planned run, and the time left below."""
        table = Table.grid(padding=(0, 2))
        width = min(CURVE_WIDTH, self.steps)
        for index, rewards in enumerate(self.rewards):
            is_running = index == self.current and not self.phase
            curve = Text(sparkline(rewards, self.steps, width), style="cyan" if is_running else "")
            curve.append("·" * (width - len(curve)), style="dim")
            table.add_row(
                Text(self.name(index), style="bold" if is_running else "" if rewards else "dim"),
                curve,
                f"step {len(rewards)}/{self.steps}" if rewards else "",
                f"reward {sum(rewards[-5:]) / len(rewards[-5:]):.2f}" if rewards else "",
                f"{self.seconds[index]:.0f} s" if rewards else "",
            )
        return Group(table, Text(self.phase or self.time_left(), style="italic"))
