"""One replica: train the codebook task with the three channels, and synchronise by a callback.

For your own training keep the last lines of `train_replica`: the callback, and the trainer inside its `with`.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from datasets import Dataset

from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import CHANNELS, Settings
from composer_plugins.recipes.codebook.run import make_start, trainer_config
from composer_plugins.recipes.diloco import Replica
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, Round
from composer_plugins.recipes.diloco.outer import trained_weights
from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo


def make_callback(options: Replica, on_round: OnRound) -> OuterCallback:
    """The transport that the options name."""
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


def train_replica(
    options: Replica,
    emit: Callable[[dict[str, Any]], None],
    make: Callable[[Replica, OnRound], OuterCallback] = make_callback,
) -> None:
    """Train, and call `emit` with each round and with the result.

    All replicas start from the same weights. Each has its part of the rows and samples for itself.
    """
    torch.set_num_threads(1)  # the model of the codebook task is too small for more
    rewards: list[float] = []

    def on_round(round_: Round) -> None:
        recent = rewards[-options.sync_every :]
        reward = sum(recent) / len(recent) if recent else None
        emit({"replica": options.replica, **vars(round_), "reward": reward})

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, make(options, on_round) as diloco:
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
        emit(
            {
                "replica": options.replica,
                "rewards": rewards,
                "greedy": task.greedy_accuracy(start.model, start.tokenizer, start.rows),
                "bytes_of_weights": sum(weight.numel() * weight.element_size() for weight in weights),
                # An object store counts its bytes, and torchft does not.
                **({"sent": diloco.store.sent} if isinstance(diloco, ObjectStoreDiLoCo) else {}),
            }
        )
