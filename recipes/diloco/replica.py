"""One replica: train the codebook task with the three channels, and synchronise by a callback.

For your own training keep the last lines of `train_replica`: the callback, and the trainer inside its `with`.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOTrainer
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.options import CHANNELS, Settings
from composer_plugins.recipes.codebook.run import RewardRecorder, make_start, trainer_config
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, Round
from composer_plugins.recipes.diloco.outer import trained_weights


@dataclass(frozen=True)
class Replica:
    """The options of one replica."""

    replica: int
    replicas: int
    steps: int
    sync_every: int
    seed: int
    timeout: float
    lighthouse: str = ""
    store: str = ""
    host: str = ""


def make_callback(options: Replica, on_round: OnRound) -> OuterCallback:
    """The transport that the options name."""
    if options.store:
        from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo

        return ObjectStoreDiLoCo(
            store=options.store,
            replica=options.replica,
            replicas=options.replicas,
            sync_every=options.sync_every,
            timeout=options.timeout,
            on_round=on_round,
        )
    from composer_plugins.recipes.diloco.torchft_callback import TorchftDiLoCo

    return TorchftDiLoCo(
        lighthouse=options.lighthouse,
        replica=str(options.replica),
        replicas=options.replicas,
        sync_every=options.sync_every,
        host=options.host or None,
        timeout=options.timeout,
        on_round=on_round,
    )


def train_replica(
    options: Replica,
    emit: Callable[[dict[str, Any]], None],
    make: Callable[[Replica, OnRound], OuterCallback] = make_callback,
) -> None:
    """Train, and call `emit` with each round and with the result.

    All replicas start from the same weights. Each has its part of the rows and samples for itself.
    """
    torch.set_num_threads(1)  # the model of the codebook task is too small for more
    rewards = RewardRecorder(lambda step, reward: None)

    def on_round(round_: Round) -> None:
        recent = rewards.rewards[-options.sync_every :]
        reward = sum(recent) / len(recent) if recent else None
        emit({"replica": options.replica, **vars(round_), "reward": reward})

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, make(options, on_round) as diloco:
        start = make_start(options.seed)
        rows = start.rows[options.replica :: options.replicas]
        settings = Settings(steps=options.steps)
        own_seed = options.seed + 1 + options.replica
        trainer = ComposerGRPOTrainer(
            model=start.model,
            reward_funcs=task.codebook_reward,
            args=trainer_config(CHANNELS, own_seed, settings, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=start.tokenizer,
            callbacks=[rewards, diloco],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        weights = trained_weights(start.model).values()
        emit(
            {
                "replica": options.replica,
                "rewards": rewards.rewards,
                "greedy": task.greedy_accuracy(start.model, start.tokenizer, start.rows),
                "bytes_of_weights": sum(weight.numel() * weight.element_size() for weight in weights),
                **transferred(diloco),
            }
        )


def transferred(diloco: OuterCallback) -> dict[str, int]:
    """The bytes that an object store counted; torchft counts none."""
    store = getattr(diloco, "store", None)
    return {"sent": store.sent, "received": store.received} if store else {}
