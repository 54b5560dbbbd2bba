"""A tiny training for the tests of DiLoCo: the replicas as processes, and the same in one process."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

SYNC_EVERY = 3
SECONDS = 240  # the limit of whatever waits for a process


def make_model(seed: int = 0) -> nn.Module:
    """Replicas may be threads here, so torch's global generator is not used."""
    model, generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), torch.Generator()
    generator.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def batch(replica: int, round_: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * round_ + step)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(-1, keepdim=True).sin() + 0.3 * replica * x[:, :1]


class Learner:
    """A replica between two synchronisations: the model and the state of its inner optimizer."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, weights: Tensors, replica: int, round_: int, pause: float = 0.0) -> Tensors:
        load_weights(self.model, weights)
        for step in range(SYNC_EVERY):
            x, y = batch(replica, round_, step)
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
            time.sleep(pause)
        return trained_weights(self.model)


def reference(rounds: Sequence[Sequence[int]], trained: Sequence[tuple[int, int, int]]) -> list[str]:
    """The hashes of the weights after each round, computed in this process.

    `rounds` has the replicas that count. `trained` has (replica, attempt, round) in the order in which the
    replicas began to train: an attempt is a process, and its inner optimizer starts anew.
    """
    state, hashes = initial_state(trained_weights(make_model())), []
    learners: dict[tuple[int, int], Learner] = {}
    for number, participants in enumerate(rounds):
        local = {}
        for replica, attempt, round_ in trained:
            if round_ == number:
                learner = learners.setdefault((replica, attempt), Learner())
                local[replica] = learner.train(state.weights, replica, number)
        gradients = [pseudo_gradient(state.weights, local[replica]) for replica in sorted(participants)]
        state = outer_step(state, mean(gradients), OuterOptimizer())
        hashes.append(weights_hash(state.weights))
    return hashes


def make_rounds(store: ObjectStore, replica: int, replicas: int = 3, **options: Any) -> Rounds:
    options = {"quorum": 1, "timeout": 60.0, "outer": OuterOptimizer(), **options}
    return Rounds(store, replica=replica, replicas=replicas, **options)


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
    weights_seed: int = 0,
    dies: tuple[str, str] | None = None,
) -> list[Commit]:
    """Train until so many rounds are committed. Each round that begins is a line in `log`."""
    torch.set_num_threads(1)
    store = ObjectStore(url, owner=str(replica))
    if dies:
        die_at(*dies)
    exchange = make_rounds(store, replica, replicas, timeout=timeout)
    exchange.join(trained_weights(make_model(weights_seed)), {"sync_every": SYNC_EVERY})
    learner, commits = Learner(), []
    while exchange.round < rounds:
        if log:
            write_line(log, [replica, attempt, exchange.round])
        local = learner.train(exchange.state.weights, replica, exchange.round, pause)
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

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment in ("before the link", "after the link"):

        def watched(source: Any, target: Any) -> None:
            if f"/{prefix}" in str(target) and moment == "before the link":
                die()
            link(source, target)
            if f"/{prefix}" in str(target):
                die()

        os.link = watched  # type: ignore[assignment]
        return

    def watched_put(self: ObjectStore, name: str, data: bytes) -> None:
        if name.startswith(prefix) and moment == "before":
            die()
        if name.startswith(prefix) and moment == "in the middle of the file":
            Path(self.root, "temporary", f"{self.owner}-half").write_bytes(data[: len(data) // 2])
            die()
        put_new(self, name, data)
        if name.startswith(prefix) and moment == "after":
            die()

    ObjectStore.put_new = watched_put  # type: ignore[method-assign]


FORKSERVER = multiprocessing.get_context("forkserver")
# What takes seconds to import. An optimizer imports torch._dynamo.
FORKSERVER.set_forkserver_preload(
    ["torch._dynamo", "composer_plugins.recipes.diloco.rounds", "transformers.trainer", "torchft"]
)
os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse logs every quorum


@contextmanager
def processes() -> Iterator[Callable[..., Any]]:
    """Give a function that starts `run_replica` in a process; kill all that are left at the end."""
    started = []

    def start(*arguments: Any, target: Callable[..., Any] = run_replica, **options: Any) -> Any:
        process = FORKSERVER.Process(target=target, args=arguments, kwargs=options, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            with contextlib.suppress(ValueError):
                process.kill()
                process.join(SECONDS)


def commits_of(url: str) -> list[Commit]:
    store = ObjectStore(url)
    return [Commit.of(store.read(name) or b"", name) for name in store.names("commits")]
