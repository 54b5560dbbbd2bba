"""Train the tiny model on the environment, with the policy loss alone and with the hint channel beside it."""

import copy
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from datasets import Dataset
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.recipes import tiny
from composer_plugins.recipes.openenv import policy
from composer_plugins.recipes.openenv.environment import ATTEMPTS
from composer_plugins.recipes.openenv.server import NO_SANDBOX, serving
from composer_plugins.recipes.openenv.tasks import make_tasks
from composer_plugins.recipes.openenv.trl_tools import environments

HINT_WEIGHT = 4.0
BATCH, GENERATIONS = 32, 4
LAST_STEPS = 5  # the last reward is a mean over these

CALLS, HINTED = "tools/call_frequency", "composer/hint/row_frac"


@dataclass
class Run:
    """What TRL logged at every step of a run."""

    name: str
    logs: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def first(self, key: str) -> float:
        """The value of the first step, whose rollouts are sampled before the first update."""
        return self.logs[0].get(key, 0.0)

    def last(self, key: str) -> float:
        """The mean of the last steps."""
        values = [log.get(key, 0.0) for log in self.logs[-LAST_STEPS:]]
        return sum(values) / len(values)


def trainer_config(hint_weight: float, steps: int, seed: int, output_dir: str) -> ComposerGRPOConfig:
    """The config of a run; the hint is the error text of the environment."""
    hint: dict[str, Any] = {}
    if hint_weight:
        hint = {"hint_weight": hint_weight, "hint_source": "environment", "hint_teacher": "base"}
    return ComposerGRPOConfig(
        **hint,
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        num_generations=GENERATIONS,
        max_completion_length=96,
        max_tool_calling_iterations=ATTEMPTS,
        chat_template_kwargs=policy.CHAT,
        learning_rate=2e-3,
        seed=seed,
        **tiny.ON_A_CPU,
    )


def train(
    url: str,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: ComposerGRPOConfig,
    run: Run,
    console: Console,
) -> None:
    """Train `model` in place; `run` gets the logs, and the console the reward now and then."""
    began = time.perf_counter()
    rows = [
        {"prompt": [{"role": "user", "content": ""}], "seed": config.seed, "task": task}
        for task in range(len(make_tasks(config.seed)))
    ]

    def on_step(step: int, reward: float) -> None:
        if step % 10 == 0:
            console.print(f"{run.name}: step {step}, reward {reward:.2f}")

    with environments(url) as factory:
        dataset = Dataset.from_list(rows)
        run.logs = tiny.train(model, tokenizer, dataset, config, on_step, environment_factory=factory)
    run.seconds = time.perf_counter() - began


def demo(url: str, steps: int, seed: int, console: Console) -> bool:
    """Train without and with hints; True if the reward rose with them and no process is left.

    Without the address of a server, one is started.
    """
    torch.set_num_threads(1)
    runs = [Run("RL"), Run("RL + hint")]
    if not url:
        console.print(NO_SANDBOX)
    with nullcontext(url) if url else serving(BATCH) as url, tiny.quiet_libraries():
        console.print(f"the environment is served at {url}")
        torch.manual_seed(seed)
        tokenizer = policy.make_tokenizer()
        model = policy.make_model(tokenizer)
        began = time.perf_counter()
        loss = policy.warm_up(model, tokenizer, seed)
        console.print(f"warm-up: loss {loss:.3f} after {time.perf_counter() - began:.0f} seconds")
        for run, weight in zip(runs, (0.0, HINT_WEIGHT), strict=True):
            with tempfile.TemporaryDirectory() as output_dir:
                config = trainer_config(weight, steps, seed, output_dir)
                train(url, copy.deepcopy(model), tokenizer, config, run, console)
    left = psutil.Process().children(recursive=True)
    console.print(results_table(runs))
    console.print(f"processes left: {len(left)}")
    return not left and runs[-1].last("reward") > runs[-1].first("reward")


def results_table(runs: list[Run]) -> Table:
    """Rewards, calls and hints of the runs, at the first step and at the last ones."""
    table = Table(
        "channels", "reward", "tool calls per rollout", "rollouts with a hint", "seconds", box=SIMPLE
    )
    for run in runs:
        values = [f"{run.first(key):.2f} -> {run.last(key):.2f}" for key in ("reward", CALLS, HINTED)]
        table.add_row(run.name, *values, f"{run.seconds:.0f}")
    return table
