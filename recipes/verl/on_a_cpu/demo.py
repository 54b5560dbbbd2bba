"""`make demo-verl`: run verl's main_ppo on two cores with recipes/verl/hint_sdpo.yaml and a replay channel.

    python -m composer_plugins.recipes.verl.on_a_cpu.demo [verl's overrides, key=value]

One line shows the progress. verl's log, the metrics and the parameters of each step stay in build/demo_verl.
"""

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from composer_plugins.recipes.verl.on_a_cpu.showing import Progress, show

if TYPE_CHECKING:
    from composer_plugins.recipes.verl.on_a_cpu.runner import Run

OUT = Path("build", "demo_verl")
STEPS = 8
SCALE = 10.0  # of the tiny model's weights, so that the prompt changes its responses
TITLE = "verl's main_ppo: policy + hint + replay"

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
READING = """\
Reward: the share of ASCII in a response, the mean over 64 responses to 8 prompts.
Policy loss: that of GRPO. It stays around 0 whether the policy learns or not.
Hint loss (weight 10): SDPO's divergence from the teacher, the first policy with the answer in its prompt.
Replay (weight 0.5): DPO on recorded pairs. At step 1 the policy is its reference: log 2, margin 0.
It works if the replay loss falls, its margin rises, and the hint loss falls, but not at every step.
Eight steps of a random model show that the channels train, and not that they help."""


def main(more: Sequence[str]) -> int:
    """Train, print the table and return the exit status."""
    return show(partial(train, more), OUT, STEPS, TITLE, lambda _: READING)


def train(more: Sequence[str], progress: Progress) -> "Run":
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
