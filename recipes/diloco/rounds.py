"""Rounds of DiLoCo between replicas that share nothing but an object store.

In a round, each replica writes three objects, in this order:

round-000003/replica-1.safetensors   the pseudo-gradient of replica 1 in round 3
round-000003/replica-1.json          its marker: the hash of that object, and what the round started with
round-000003/replica-1.result.json   the hash of the weights after the outer step

A pseudo-gradient whose marker is missing or cut off does not exist for a reader. So a replica that was killed
while it wrote trains the round again. What has its marker is not written again.

A replica waits for the markers of all replicas, adds their pseudo-gradients in the order of the replicas, and
takes the outer step. All compute the same weights; other weights in a marker or a result are an error. A
replica that starts again takes the steps of the rounds that it had marked, and trains the next one.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    Tensors,
    pseudo_gradient,
    take_outer_step,
    weights_hash,
)


def name_of(number: int, replica: int) -> str:
    """Return the name of a replica's objects in a round, without its end."""
    return f"round-{number:06d}/replica-{replica}"


class Rounds:
    """The rounds of a run, as one of its replicas sees them.

    `settings` are what all replicas must have in common beside their number and the outer optimizer.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        replica: int,
        replicas: int,
        timeout: float,
        outer: OuterOptimizer,
        weights: Tensors,
        settings: Mapping[str, Any],
    ) -> None:
        if not 0 <= replica < replicas:
            raise ConfigError("replica", f"it is {replica}", f"number the {replicas} replicas from 0")
        self.store, self.replica, self.replicas = store, replica, replicas
        self.timeout = timeout
        settings = {**settings, "replicas": replicas, "outer": vars(outer)}
        self.start = {**settings, "weights": weights_hash(weights)}  # what the next round starts with
        self.weights, self.optimizer = weights, outer.of(weights.values())
        self.done = 0  # how many rounds' outer steps were taken

    def is_marked(self) -> bool:
        """Return whether this replica, before it was started again, has trained the next round."""
        if self.read(self.replica) is not None:
            return True
        for replica in range(self.replicas):
            if self.store.read(f"{name_of(self.done + 1, replica)}.result.json") is not None:
                raise self.lost(f"the own marker of round {self.done + 1} is gone; replica {replica} used it")
        return False

    def synchronise(self, local: Tensors) -> None:
        """Publish what this replica trained, wait for the others, and take the outer step."""
        delta = pseudo_gradient(self.weights, local)
        if not all(torch.isfinite(value).all() for value in delta.values()):
            problem = f"this replica's weights are not finite after round {self.done + 1}"
            raise DataError("model", problem, "lower the learning rate, and start the replica again")
        if self.is_marked():
            problem = f"another process has trained round {self.done + 1} as replica {self.replica}"
            raise DataError("replica", problem, "number each process differently, and start this one again")
        data = save(delta)
        marker = {"sha256": hashlib.sha256(data).hexdigest(), **self.start}
        name = name_of(self.done + 1, self.replica)
        self.store.write(f"{name}.safetensors", data)
        self.store.write(f"{name}.json", json.dumps(marker).encode())
        self.take_step()

    def take_step(self) -> None:
        """Wait until all replicas have marked the round, take its outer step, and publish the result."""
        gradients = self.wait_for(f"round {self.done + 1} has no marker", self.read)
        take_outer_step(self.weights, self.optimizer, gradients)
        self.done += 1
        self.start["weights"] = weights_hash(self.weights)
        name = f"{name_of(self.done, self.replica)}.result.json"
        if self.read_start(name) is None:
            self.store.write(name, json.dumps(self.start).encode())

    def finish(self) -> None:
        """Wait until all replicas have taken the last outer step, and compare their weights."""
        self.wait_for(
            f"round {self.done} has no result",
            lambda replica: self.read_start(f"{name_of(self.done, replica)}.result.json"),
        )

    def wait_for(self, absent: str, read: Callable[[int], Any]) -> list[Any]:
        """Return what `read` returns of each replica, as soon as it is None for none of them."""
        found: list[Any] = [None] * self.replicas
        ends = time.monotonic() + self.timeout
        while True:
            is_over = time.monotonic() > ends
            found = [read(number) if value is None else value for number, value in enumerate(found)]
            missing = [str(number) for number, value in enumerate(found) if value is None]
            if not missing:
                return found
            if is_over:
                problem = f"{absent} of replica {', '.join(missing)} after {self.timeout:g} seconds"
                raise DataError("replicas", problem, "start the missing ones again, and then this one")
            time.sleep(self.store.poll_seconds)

    def read(self, replica: int) -> Tensors | None:
        """Return the pseudo-gradient of a replica in the next round, or None if it is not marked."""
        name = name_of(self.done + 1, replica)
        if (marker := self.read_start(f"{name}.json")) is None:
            return None
        data = self.store.read(f"{name}.safetensors")
        if data is None or hashlib.sha256(data).hexdigest() != marker.get("sha256"):
            raise self.lost(f"{name}.safetensors is not what its marker says")
        return load(data)

    def read_start(self, name: str) -> dict[str, Any] | None:
        """Return a marker or a result, after comparing it with `start`; None if it is absent or cut off."""
        try:
            found: dict[str, Any] = json.loads(self.store.read(name) or b"")
        except ValueError:
            return None
        for key, here in self.start.items():
            if (there := found.get(key)) != here:
                problem = f"{name} was made with {key} {there} and not {here}"
                if key == "weights" and self.done:
                    raise self.lost(f"{problem}, and the settings are equal")
                remedy = "start all replicas with the same settings and weights, and a new run in a new store"
                raise ConfigError("store", f"in {self.store.url}, {problem}", remedy)
        return found

    def lost(self, problem: str) -> DataError:
        """Return the error for an object that is not what the replicas have used."""
        problem = f"in {self.store.url}, {problem}: the store has lost data, or two processes have one number"
        return DataError("store", problem, "begin a new run in a new store, or restore this one")
