"""The cost of each channel: seconds per optimizer step beside plain TRL, as ratios within one run.

A three-layer Qwen3 with random weights and scripted rollouts, so that only the loss is timed. The trainers
run in turns, and the medians over the turns are compared. CPU, 2 threads.
"""

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.timing import THREADS
from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.recipes.codebook.task import make_tokenizer
from composer_plugins.testing.tiny_config import tiny_config

ROWS, COMPLETION, TURNS, STEPS = 8, 48, 5, 3

RUNS: dict[str, dict[str, Any] | None] = {
    "plain GRPOTrainer": None,
    "mixin, policy='trl'": {},
    "mixin, policy='trl', health off": {"health": False},
    "mixin, policy='grpo'": {"policy": "grpo"},
    "mixin, policy='grpo', health off": {"policy": "grpo", "health": False},
    "+ hint, sampled token": {"hint_weight": 1.0, "hint_divergence": "sampled_token"},
    "+ hint, full JSD": {"hint_weight": 1.0},
    "+ replay, SimPO": {"replay_weight": 1.0, "replay_loss": "simpo"},
    "+ replay, DPO": {"replay_weight": 1.0},
    "+ hint JSD + DPO": {"hint_weight": 1.0, "replay_weight": 1.0},
}


def scripted(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    row: dict[str, Any],
    sizes: tuple[int, int],
    options: dict[str, Any] | None,
    **more: Any,
) -> GRPOTrainer:
    """A trainer of these rows and tokens, whose rollouts are scripted; without options it is TRL's own."""
    rows, length = sizes

    def rollout(prompts: list[str], made: GRPOTrainer) -> dict[str, Any]:
        ids = [[3 + (i + t) % 10 for t in range(length)] for i in range(len(prompts))]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    return (GRPOTrainer if options is None else ComposerGRPOTrainer)(
        model=model,
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 7 / 7 for ids in completion_ids],
        args=(GRPOConfig if options is None else ComposerGRPOConfig)(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=rows,
            max_completion_length=length,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **more,
            **(options or {}),
        ),
        train_dataset=Dataset.from_list([row] * rows),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def trainer(options: dict[str, Any] | None, tokenizer: PreTrainedTokenizerFast) -> GRPOTrainer:
    """A trainer with a three-layer Qwen3, whose completions have COMPLETION tokens each."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 384, "num_hidden_layers": 3, "max_position_embeddings": 256}
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_config(4096, 128, **sizes)))
    row = {"prompt": "a?", "privileged_context": "[12]", "chosen": "12" * 16, "rejected": "34" * 16}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    made = scripted(model, tokenizer, row, (ROWS, COMPLETION), options, max_steps=STEPS, **quiet)
    made.remove_callback(PrinterCallback)
    return made


def seconds_per_step(made: GRPOTrainer) -> float:
    """One turn: STEPS optimizer steps."""
    start = time.perf_counter()
    made.train()
    return (time.perf_counter() - start) / STEPS


def import_seconds(statement: str) -> float:
    """Wall time of a fresh interpreter that runs `statement`, less that of one that runs nothing."""

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return min(once(statement) for _ in range(5)) - min(once("pass") for _ in range(5))


def imports() -> Table:
    """The time of our imports beside that of torch."""
    made = Table("import", "seconds", title="Imports, above an empty interpreter")
    for statement in ("import composer_plugins", "import composer_plugins.cli", "import torch"):
        made.add_row(statement, f"{import_seconds(statement):.3f}")
    return made


def table() -> Table:
    """Milliseconds per optimizer step of each trainer, and how many times plain TRL's they are."""
    # transformers renamed the option; TRL 1.16 uses the old name.
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing", category=FutureWarning)
    tokenizer = make_tokenizer()
    trainers = {name: trainer(options, tokenizer) for name, options in RUNS.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(TURNS + 1):
        for name, made in trainers.items():
            elapsed = seconds_per_step(made)
            if turn > 0:  # the first turn warms up
                times[name].append(elapsed)
    plain = statistics.median(times["plain GRPOTrainer"])
    steps = Table(
        "loss", "ms per step", "x plain TRL", title=f"{ROWS} rows of {COMPLETION} tokens, {THREADS} threads"
    )
    for name, elapsed in times.items():
        median = statistics.median(elapsed)
        steps.add_row(name, f"{1000 * median:.0f}", f"{median / plain:.2f}")
    return steps
