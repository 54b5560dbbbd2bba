"""What a person sees of a run of main_ppo: one line while it trains, and then a table or the error."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_plugins.recipes.shared import INTERRUPTED
from composer_plugins.recipes.verl.on_a_cpu import missing

if TYPE_CHECKING:  # the runner imports torch, for which nobody waits before the first line
    from composer_plugins.recipes.verl.on_a_cpu.runner import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A text in verl's log that marks the beginning of a stage, and the line that is shown from then on.
STAGES = (
    ("", "making the files of the run and starting verl"),
    ("ray init kwargs", "starting Ray"),
    ("Started a local Ray instance", "starting verl's workers"),
    ("Total training steps", "loading the model as actor, reference and rollout"),
    ("Training Progress", "training"),
)
COLUMNS = (
    ("Reward", "critic/rewards/mean", ".3f"),
    ("Policy\nloss", "actor/pg_loss", "+.3f"),
    ("Hint\nloss", "actor/composer/hint/loss", ".4f"),
    ("Replay\nloss", "actor/composer/replay/loss", ".3f"),
    ("Replay\nmargin", "actor/composer/replay/rewards/margins", "+.3f"),
    ("Replay\naccuracy", "actor/composer/replay/rewards/accuracies", ".0%"),
    ("\nTime", "timing_s/step", ".0f"),
)


def show(
    train: "Callable[[Progress], Run]", out: Path, steps: int, title: str, reading: Callable[["Run"], str]
) -> int:
    """Train, print the table and what `reading` says of the run, and return the exit status."""
    console = Console(highlight=False)
    if gone := missing():
        console.print(f"this environment cannot run verl's main_ppo: {gone}", soft_wrap=True)
        return 2
    for number in SIGNALS:
        signal.signal(number, stop)
    progress = Progress(console, out, steps)
    log = out / "main_ppo.log"
    try:
        with progress.status:
            done = train(progress)
    except KeyboardInterrupt:
        kept = f"; {log} is kept" if log.exists() else ""
        console.print(
            f"interrupted after {progress.seconds:.0f} s; verl and Ray are stopped{kept}", soft_wrap=True
        )
        return INTERRUPTED
    trained = [one for one in done.metrics if "actor/pg_loss" in one]
    if done.code != 0 or len(trained) < steps:
        why = "took too long" if done.code is None else f"ended with exit status {done.code}"
        console.print(f"main_ppo {why}. The last lines of {log}:\n", soft_wrap=True)
        console.print("\n".join(last_lines(done.log)), markup=False, soft_wrap=True)
    else:
        console.print(table(trained, title))
        console.print(reading(done), soft_wrap=True)
        console.print(f"\n{done.seconds:.0f} s; verl's log: {log}", soft_wrap=True)
    if done.left:
        console.print(f"still alive: {', '.join(done.left)}", markup=False, soft_wrap=True)
    return int(done.code != 0 or len(trained) < steps or bool(done.left))


def stop(*_: Any) -> None:
    """End the run at the first Ctrl-C and ignore a second one, which would leave processes of Ray behind."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class Progress:
    """A line that shows the progress; without a terminal, a new line for each stage and step."""

    def __init__(self, console: Console, out: Path, steps: int) -> None:
        self.console, self.out, self.steps = console, out, steps
        self.began, self.shown = time.monotonic(), ""
        self.status = console.status("")
        self.show(STAGES[0][1])

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def show(self, stage: str) -> None:
        """Show the stage and the time so far."""
        self.status.update(f"{stage} ({self.seconds:.0f} s)")
        if stage != self.shown and not self.console.is_terminal:
            self.console.print(f"{self.seconds:4.0f} s  {stage}")
        self.shown = stage

    def watch(self) -> None:
        """Show the progress according to the files of the run."""
        path = self.out / "metrics.jsonl"
        made = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
        self.show(stage((self.out / "main_ppo.log").read_text(errors="replace"), made, self.steps))


def stage(log: str, made: Sequence[dict[str, Any]], steps: int) -> str:
    """The stage that a run has reached, by its log and its metrics so far."""
    said = next(said for words, said in reversed(STAGES) if words in log)
    if said != STAGES[-1][1]:
        return said
    rewards = [one["critic/rewards/mean"] for one in made if "critic/rewards/mean" in one]
    if len(rewards) >= steps:
        return "stopping Ray"
    reward = f", reward {rewards[-1]:.3f}" if rewards else ""
    return f"training, step {len(rewards) + 1} of {steps}{reward}"


def table(steps: Sequence[dict[str, Any]], title: str) -> Table:
    """Make a table with one row per step, which fits in 80 columns; without the columns that no step has."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = [one for one in COLUMNS if any(one[1] in step for step in steps)]
    for name, *_ in (("\nStep",), *columns):
        made.add_column(name if "\n" in name else f"\n{name}", justify="right")
    for i, step in enumerate(steps, start=1):
        cells = [format(step[key], how) if key in step else "-" for _, key, how in columns]
        made.add_row(str(i), *cells[:-1], f"{cells[-1]} s")
    return made


def last_lines(log: str, count: int = 15) -> list[str]:
    """The end of verl's log, after the last earlier line that names an error."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines[:-count] if "Error: " in line]
    return [*errors[-1:], *lines[-count:]]
