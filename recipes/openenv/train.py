"""Train the tiny model on the environment, with the policy loss alone and with the hint channel beside it."""

import copy
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from datasets import Dataset
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.recipes.codebook.run import quiet_libraries
from composer_plugins.recipes.openenv import tiny
from composer_plugins.recipes.openenv.environment import ATTEMPTS
from composer_plugins.recipes.openenv.sandbox import Sandbox
from composer_plugins.recipes.openenv.server import serving
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


class LogKeeper(TrainerCallback):
    """Keeps what is logged at every step, and prints the reward now and then."""

    def __init__(self, run: Run, console: Console) -> None:
        self.run, self.console = run, console

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Called by the trainer at every log. The last one, a summary of the training, has no reward."""
        if "reward" not in logs:
            return
        self.run.logs.append(logs)
        if state.global_step % 10 == 0:
            self.console.print(f"{self.run.name}: step {state.global_step}, reward {logs['reward']:.2f}")


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
        chat_template_kwargs=tiny.CHAT,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        seed=seed,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(
    url: str,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: ComposerGRPOConfig,
    run: Run,
    console: Console,
) -> None:
    """Train `model` in place; `run` gets the logs."""
    began = time.perf_counter()
    rows = [
        {"prompt": [{"role": "user", "content": ""}], "seed": config.seed, "task": task}
        for task in range(len(make_tasks(config.seed)))
    ]
    with environments(url) as factory:
        trainer = ComposerGRPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=factory,
            callbacks=[LogKeeper(run, console)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    run.seconds = time.perf_counter() - began


def demo(sandbox: Sandbox, steps: int, seed: int, console: Console) -> bool:
    """Train without and with hints; True if the reward rose with them and no process is left."""
    torch.set_num_threads(1)
    runs = [Run("RL"), Run("RL + hint")]
    with serving(sandbox, sessions=BATCH) as url, quiet_libraries():
        console.print(f"the environment is served at {url}")
        torch.manual_seed(seed)
        tokenizer = tiny.make_tokenizer()
        model = tiny.make_model(tokenizer)
        began = time.perf_counter()
        loss = tiny.warm_up(model, tokenizer, seed)
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
