"""A tiny training for the tests of DiLoCo: the replicas as processes, and the same in one process."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    Tensors,
    initial_state,
    load_weights,
    mean,
    outer_step,
    pseudo_gradient,
    trained_weights,
    weights_hash,
)
from composer_plugins.recipes.diloco.rounds import Commit, Rounds
from parity_tests.rigs.forked import PRELOAD, SECONDS

SYNC_EVERY = 3
SETTINGS = {"sync_every": SYNC_EVERY}
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
    rounds: Sequence[Sequence[int]], trained: Sequence[tuple[int, int, int]], micro_batches: int = 1
) -> list[str]:
    """The hashes of the weights after each round, computed in this process.

    `rounds` has the replicas that count. `trained` has (replica, attempt, round) in the order in which the
    replicas began to train: an attempt is a process, and its inner optimizer starts anew.
    """
    state, hashes = initial_state(weights_of()), []
    learners: dict[tuple[int, int], Learner] = {}
    for number, participants in enumerate(rounds):
        local = {}
        for replica, attempt, round_ in trained:
            if round_ == number:
                learner = learners.setdefault((replica, attempt), Learner(micro_batches))
                local[replica] = learner.train(state.weights, replica)
        gradients = [pseudo_gradient(state.weights, local[replica]) for replica in sorted(participants)]
        state = outer_step(state, mean(gradients), OuterOptimizer())
        hashes.append(weights_hash(state.weights))
    return hashes


def make_rounds(store: ObjectStore, replica: int, replicas: int = 3, **options: Any) -> Rounds:
    options = {"quorum": 1, "timeout": 60.0, "outer": OuterOptimizer(), **options}
    return Rounds(store, replica=replica, replicas=replicas, **options)


def joined(
    url: str | Path,
    replica: int = 0,
    replicas: int = 1,
    *,
    owner: str = "",
    others: bool = True,
    **options: Any,
) -> Rounds:
    """A replica that has joined; `others`: as if all others had joined before."""
    store = ObjectStore(str(url), owner=owner)
    for other in range(replicas if others else 0):
        if other != replica:
            store.create(f"replicas/{other}-x.json", b"{}")
    rounds = make_rounds(store, replica, replicas, **options)
    rounds.join(weights_of(), SETTINGS)
    return rounds


def run_replica(
    url: str,
    replica: int,
    replicas: int,
    rounds: int,
    *,
    attempt: int = 0,
    log: str = "",
    timeout: float = 60.0,
    pause: float = 0.0,
    dies: tuple[str, str] | None = None,
) -> list[Commit]:
    """Train until so many rounds are committed. Each round that begins is a line in `log`."""
    torch.set_num_threads(1)
    if dies:
        die_at(*dies)
    exchange = joined(url, replica, replicas, owner=str(replica), others=False, timeout=timeout)
    learner, commits = Learner(), []
    while exchange.round < rounds:
        if log:
            write_line(log, [replica, attempt, exchange.round])
        local = learner.train(exchange.state.weights, replica, pause)
        commits += exchange.synchronise(local)
    return commits


def write_line(path: str, data: Any) -> None:
    """Append a line in one write, so that those of several processes do not mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(data).encode() + b"\n")


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def die_at(moment: str, prefix: str) -> None:
    """Let this process kill itself when it creates an object whose name begins with `prefix`."""
    link, put_new = os.link, ObjectStore.put_new

    def die(now: str, name: str) -> None:
        if now == moment and prefix in name:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched_link(source: Any, target: Any) -> None:
        die("before the link", str(target))
        link(source, target)
        die("after the link", str(target))

    def watched_put(self: ObjectStore, name: str, data: bytes) -> None:
        die("before", name)
        if moment == "in the middle of the file":
            Path(self.root, "temporary", f"{self.owner}-half").write_bytes(data[: len(data) // 2])
        die("in the middle of the file", name)
        put_new(self, name, data)
        die("after", name)

    os.link = watched_link  # type: ignore[assignment]
    ObjectStore.put_new = watched_put  # type: ignore[method-assign]


# An optimizer imports torch._dynamo.
PRELOAD += ["torch._dynamo", "composer_plugins.recipes.diloco.rounds", "transformers.trainer", "torchft"]
os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse logs every quorum


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def commits_of(url: str) -> list[Commit]:
    store = ObjectStore(url)
    return [Commit.of(store.read(name) or b"", name) for name in store.names("commits")]
