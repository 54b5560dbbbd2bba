"""What a training run leaves in its process: the losses of its steps, and a hash of its weights."""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import nn


class Record(NamedTuple):
    """What the ranks of a run are compared by."""

    ranks: int  # that trained together
    losses: list[float]  # of each step, over all ranks
    weights: str  # sha256


kept: list[Record] = []  # of this process, the newest last


def keep(ranks: int, losses: list[float], model: nn.Module) -> Record:
    """Keep the record of a run that has ended in this process."""
    kept.append(Record(ranks, losses, sha256_of(model)))
    return kept[-1]


def sha256_of(model: nn.Module) -> str:
    """A hash of the names and the values of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def keep_those_of_trainers() -> None:
    """Keep the record of every transformers.Trainer that this process constructs from now on."""
    from transformers import TrainerCallback
    from transformers.trainer import DEFAULT_CALLBACKS

    class KeepRecord(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            losses = [float(log["loss"]) for log in state.log_history if "loss" in log]
            keep(args.world_size, losses, kwargs["model"])

    DEFAULT_CALLBACKS.append(KeepRecord)
