"""One replica: train the codebook task with the three channels, and synchronise by a callback.

For your own training keep the last lines of `train_replica`: the callback, and the trainer inside its `with`.
"""

import json
import tempfile
from statistics import fmean
from typing import Any

from datasets import Dataset

from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import CHANNELS, Settings
from composer_plugins.recipes.codebook.run import FINAL_STEPS, make_start, trainer_config
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback
from composer_plugins.recipes.diloco.launching import Replica
from composer_plugins.recipes.diloco.outer import trained_weights
from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo


def make_callback(options: Replica, on_round: OnRound) -> OuterCallback:
    """Return the transport that the options name."""
    common: dict[str, Any] = {
        "replicas": options.replicas,
        "sync_every": options.sync_every,
        "timeout": options.timeout,
        "on_round": on_round,
    }
    if options.store:
        return ObjectStoreDiLoCo(store=options.store, replica=options.replica, **common)
    from composer_plugins.recipes.diloco.torchft_callback import TorchftDiLoCo

    name, host = str(options.replica), options.host or None
    return TorchftDiLoCo(lighthouse=options.lighthouse, replica=name, host=host, **common)


def train_replica(options: Replica) -> None:
    """Train, and print a line of JSON after each round and one with the result.

    All replicas start from the same weights. Each has its part of the rows and samples for itself.
    """
    rewards: list[float] = []

    def report(**values: Any) -> None:
        line = json.dumps({"replica": options.replica, **values}) + "\n"
        print(line, end="", flush=True)  # in one write, so that the lines of two replicas do not mix

    def on_round(number: int, replicas: int, weights: str) -> None:
        recent = rewards[-options.sync_every :]
        reward = round(fmean(recent), 2) if recent else None
        report(round=number, replicas=replicas, weights=weights[:12], reward=reward)

    with (
        tiny.quiet_libraries(),
        tempfile.TemporaryDirectory() as folder,
        make_callback(options, on_round) as diloco,
    ):
        start = make_start(options.seed)
        rows = Dataset.from_list(start.rows[options.replica :: options.replicas])
        own_seed = options.seed + 1 + options.replica
        tiny.train(
            start.model,
            start.tokenizer,
            rows,
            trainer_config(CHANNELS, own_seed, Settings(steps=options.steps), folder),
            lambda step, reward: rewards.append(reward),
            callbacks=[diloco],
            reward_funcs=task.codebook_reward,
        )
        weights = trained_weights(start.model).values()
        report(
            first_reward=round(rewards[0], 2),
            last_rewards=round(fmean(rewards[-FINAL_STEPS:]), 2),
            greedy=round(task.greedy_accuracy(start.model, start.tokenizer, start.rows), 2),
            megabytes=round(sum(weight.numel() * weight.element_size() for weight in weights) / 1e6, 1),
        )
