"""`make demo-verl`: run verl's main_ppo on two cores with recipes/verl/hint_sdpo.yaml and a replay channel.

    python -m composer_plugins.recipes.verl.on_a_cpu.demo [verl's overrides, key=value]

One line shows the progress. verl's log, the metrics and the parameters of each step stay in build/demo_verl.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_plugins.recipes.verl.on_a_cpu import missing

OUT = Path("build", "demo_verl")
STEPS = 8
SCALE = 10.0  # of the tiny model's weights, so that the prompt changes its responses
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130

# A text in verl's log that marks the beginning of a stage, and the line that is shown from then on.
STAGES = (
    ("", "making a tiny model and starting verl"),
    ("ray init kwargs", "starting Ray"),
    ("Started a local Ray instance", "starting verl's workers"),
    ("Total training steps", "loading the model as actor, reference and rollout"),
    ("Training Progress", "training"),
)
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(c.isascii() for c in solution_str) / max(1, len(solution_str))
"""
RECIPE = ("--config-path", str(Path(__file__).parents[1].resolve()), "--config-name", "hint_sdpo")
OVERRIDES = (
    "+algorithm.composer.replay_loss=dpo",  # the third channel
    "+algorithm.composer.replay_weight=0.5",
    "algorithm.composer.hint_weight=10",  # so that eight steps show it
    "actor_rollout_ref.actor.optim.lr=3e-3",
    "data.train_max_samples=8",  # the same eight prompts at every step, so that steps compare
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"trainer.total_epochs={STEPS}",
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
READING = """\
Reward: the share of ASCII in a response, the mean over 64 responses to 8 prompts.
Policy loss: that of GRPO. It stays around 0 whether the policy learns or not.
Hint loss (weight 10): SDPO's divergence from the teacher, the first policy with the answer in its prompt.
Replay (weight 0.5): DPO on recorded pairs. At step 1 the policy is its reference: log 2, margin 0.
It works if the replay loss falls, its margin rises, and the hint loss falls, but not at every step.
Eight steps of a random model show that the channels train, and not that they help."""


def main(more: Sequence[str]) -> int:
    """Train, print the table and return the exit status."""
    console = Console(highlight=False)
    if gone := missing():
        console.print(f"this environment cannot run verl's main_ppo: {gone}", soft_wrap=True)
        return 2
    for number in SIGNALS:
        signal.signal(number, stop)
    progress = Progress(console)
    log = OUT / "main_ppo.log"
    try:
        with progress.status:
            done = train(more, progress)
    except KeyboardInterrupt:
        kept = f"; {log} is kept" if log.exists() else ""
        console.print(
            f"interrupted after {progress.seconds:.0f} s; verl and Ray are stopped{kept}", soft_wrap=True
        )
        return INTERRUPTED
    if done.code != 0 or len(done.metrics) < STEPS:
        why = "took too long" if done.code is None else f"ended with exit status {done.code}"
        console.print(f"main_ppo {why}. The last lines of {log}:\n", soft_wrap=True)
        console.print("\n".join(last_lines(done.log)), markup=False, soft_wrap=True)
    else:
        console.print(table(done.metrics))
        console.print(READING, soft_wrap=True)
        console.print(f"\n{done.seconds:.0f} s; verl's log: {log}", soft_wrap=True)
    if done.left:
        console.print(f"still alive: {', '.join(done.left)}", markup=False, soft_wrap=True)
    return int(done.code != 0 or len(done.metrics) < STEPS or bool(done.left))


def stop(*_: Any) -> None:
    """End the run at the first Ctrl-C and ignore a second one, which would leave processes of Ray behind."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class Progress:
    """A line that shows the progress; without a terminal, a new line for each stage and step."""

    def __init__(self, console: Console) -> None:
        self.console, self.began, self.shown = console, time.monotonic(), ""
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
        path = OUT / "metrics.jsonl"
        steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.show(stage((OUT / "main_ppo.log").read_text(errors="replace"), [one["data"] for one in steps]))


def stage(log: str, steps: Sequence[dict[str, Any]]) -> str:
    """The stage that a run has reached, by its log and its metrics so far."""
    said = next(said for words, said in reversed(STAGES) if words in log)
    if said != STAGES[-1][1]:
        return said
    if len(steps) >= STEPS:
        return "stopping Ray"
    reward = f", reward {steps[-1]['critic/rewards/mean']:.3f}" if steps else ""
    return f"training, step {len(steps) + 1} of {STEPS}{reward}"


def train(more: Sequence[str], progress: Progress) -> Any:
    """Train in an empty folder."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from composer_plugins.recipes.verl.on_a_cpu import tiny
    from composer_plugins.recipes.verl.on_a_cpu.overrides import quoted
    from composer_plugins.recipes.verl.on_a_cpu.runner import run

    logging.disable_progress_bar()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    folder = OUT.resolve() / "louder"
    tiny.model(folder, tiny.tokenizer(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(SCALE)
    model.save_pretrained(folder)
    reward = OUT.resolve() / "ascii.py"
    reward.write_text(REWARD)
    paths = (
        f"actor_rollout_ref.model.path={quoted(folder)}",
        f"reward.custom_reward_function.path={quoted(reward)}",
    )
    return run(OUT.resolve(), *OVERRIDES, *paths, *more, *RECIPE, steps=STEPS, watch=progress.watch)


def table(steps: Sequence[dict[str, Any]]) -> Table:
    """Make a table with one row per step, which fits in 80 columns."""
    made = Table(title="verl's main_ppo: policy + hint + replay", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title, *_ in (("\nStep",), *COLUMNS):
        made.add_column(title if "\n" in title else f"\n{title}", justify="right")
    for i, step in enumerate(steps, start=1):
        cells = [format(step[key], how) if key in step else "-" for _, key, how in COLUMNS]
        made.add_row(str(i), *cells[:-1], f"{cells[-1]} s")
    return made


def last_lines(log: str, count: int = 15) -> list[str]:
    """The end of verl's log, after the last earlier line that names an error."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines[:-count] if "Error: " in line]
    return [*errors[-1:], *lines[-count:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
