"""A tiny training for the tests of DiLoCo: the replicas as processes, and the same in one process."""

import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    Tensors,
    load_weights,
    pseudo_gradient,
    take_outer_step,
    trained_weights,
    weights_hash,
)
from composer_plugins.recipes.diloco.rounds import Rounds
from parity_tests.rigs.forked import PRELOAD

SYNC_EVERY = 3
ROWS_PER_BATCH = 8
LEARNING_RATE = 0.01


class Regression(nn.Module):
    """A tiny model, with a loss as transformers wants it."""

    def __init__(self, seed: int = 0) -> None:
        """Replicas may be threads here, so torch's global generator is not used."""
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.inner(x) - y).square().mean()}


def weights_of(seed: int = 0) -> Tensors:
    """The initial weights."""
    return trained_weights(Regression(seed))


def batch(replica: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * replica + number)
    x = torch.randn(ROWS_PER_BATCH, 4, generator=generator)
    return x, x.sum(-1, keepdim=True).sin() + 0.3 * replica * x[:, :1]


class Learner:
    """A replica between two synchronisations: the model, its optimizer, and the number of its next batch."""

    def __init__(self, micro_batches: int = 1) -> None:
        self.model, self.micro_batches, self.next = Regression(), micro_batches, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def train(self, weights: Tensors, replica: int, pause: float = 0.0) -> Tensors:
        load_weights(self.model, weights)
        for _ in range(SYNC_EVERY):
            self.optimizer.zero_grad()
            for _ in range(self.micro_batches):
                (self.model(*batch(replica, self.next))["loss"] / self.micro_batches).backward()
                self.next += 1
            self.optimizer.step()
            time.sleep(pause)
        return trained_weights(self.model)


def reference(
    rounds: Sequence[Iterable[int]], trained: Sequence[Sequence[int]], micro_batches: int = 1
) -> list[str]:
    """The hashes of the weights after each round, computed in this process.

    `rounds` has the replicas that take part. `trained` has (replica, attempt, round) in the order in which
    they began to train: an attempt is a process, and its inner optimizer starts anew. The last attempt
    counts. Who takes part in a round and has not trained has a pseudo-gradient of 0.
    """
    weights, hashes = weights_of(), []
    optimizer = OuterOptimizer().of(weights.values())
    learners: dict[tuple[int, int], Learner] = {}
    for number, replicas in enumerate(rounds):
        local = dict.fromkeys(replicas, weights)
        for replica, attempt, round_ in trained:
            if round_ == number:
                learner = learners.setdefault((replica, attempt), Learner(micro_batches))
                local[replica] = learner.train(weights, replica)
        gradients = [pseudo_gradient(weights, local[replica]) for replica in sorted(local)]
        take_outer_step(weights, optimizer, gradients)
        hashes.append(weights_hash(weights))
    return hashes


def make_rounds(
    url: str | Path, replica: int = 0, replicas: int = 1, seed: int = 0, **options: Any
) -> Rounds:
    defaults = {"timeout": 60.0, "outer": OuterOptimizer(), "settings": {"sync_every": SYNC_EVERY}}
    options = {"weights": weights_of(seed), **defaults, **options}
    return Rounds(ObjectStore(str(url)), replica=replica, replicas=replicas, **options)


def run_replica(
    url: str,
    replica: int,
    replicas: int,
    rounds: int,
    log: str,
    *,
    attempt: int = 0,
    pause: float = 0.0,
    dies: tuple[str, str] | None = None,
) -> None:
    """Train so many rounds. A line of the log is a round that begins, one that has ended, or the end."""
    torch.set_num_threads(1)
    if dies:
        die_at(*dies)
    exchange, learner = make_rounds(url, replica, replicas), Learner()
    while exchange.is_marked():
        exchange.take_step()
    while exchange.done < rounds:
        write_line(log, ["trains", replica, attempt, exchange.done])
        exchange.synchronise(learner.train(exchange.weights, replica, pause))
        write_line(log, ["weights", exchange.done - 1, weights_hash(exchange.weights)])
    exchange.finish()
    write_line(log, ["ended", replica, weights_hash(exchange.weights)])


def write_line(path: str, data: Any) -> None:
    """Append a line in one write, so that those of several processes do not mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(data).encode() + b"\n")


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def die_at(moment: str, kind: str) -> None:
    """Let this process kill itself when it writes an object of this kind in the second round."""
    write = ObjectStore.write

    def watched(self: ObjectStore, name: str, data: bytes) -> None:
        if not (name.startswith("round-000002/") and name.endswith(kind)):
            return write(self, name, data)
        if moment != "before":
            write(self, name, data[: len(data) // 2] if moment == "half" else data)
        os.kill(os.getpid(), signal.SIGKILL)

    ObjectStore.write = watched  # type: ignore[method-assign]


# An optimizer imports torch._dynamo.
PRELOAD += ["torch._dynamo", "composer_plugins.recipes.diloco.rounds", "transformers.trainer", "torchft"]
os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse logs every quorum
