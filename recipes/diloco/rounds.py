"""Rounds of DiLoCo between replicas that share nothing but an object store.

In a round, each replica writes two objects, which no other replica writes:

round-000003/replica-1.safetensors   the pseudo-gradient of replica 1 in round 3
round-000003/replica-1.json          its marker, written last: the hash of that object, and what the replica
                                     started the round with

A pseudo-gradient without its marker does not exist for a reader. A marker that is cut off, or has another
hash than the object, is no marker yet. So it does not matter when a replica is killed while it writes, nor
which part of an object a reader meets: the replica writes both again, and the reader looks again.

A replica waits for the markers of all replicas, adds their pseudo-gradients in the order of the replicas, and
takes the outer step. All compute the same numbers, so there is nothing to agree on. A replica that starts
again takes the steps of the rounds that it had marked, from the first one on, and trains the next one.
"""

import hashlib
import json
import time
from collections.abc import Mapping
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
        self.settings = {**settings, "replicas": replicas, "outer": vars(outer)}
        self.weights, self.optimizer = weights, outer.of(weights.values())
        self.done = 0  # how many rounds' outer steps were taken

    @property
    def start(self) -> dict[str, Any]:
        """What this replica starts the next round with. It must be equal on all replicas."""
        return {**self.settings, "weights": weights_hash(self.weights)}

    def is_marked(self) -> bool:
        """Return whether this replica, before it was started again, has trained the next round."""
        return self.read(self.replica) is not None

    def synchronise(self, local: Tensors) -> None:
        """Publish what this replica trained, wait for the others, and take the outer step."""
        delta = pseudo_gradient(self.weights, local)
        if not all(torch.isfinite(value).all() for value in delta.values()):
            problem = f"this replica's weights are not finite after round {self.done + 1}"
            raise DataError("model", problem, "lower the learning rate, and start the replica again")
        data = save(delta)
        marker = {"sha256": hashlib.sha256(data).hexdigest(), "start": self.start}
        name = name_of(self.done + 1, self.replica)
        self.store.write(f"{name}.safetensors", data)
        self.store.write(f"{name}.json", json.dumps(marker).encode())
        self.take_step()

    def take_step(self) -> None:
        """Wait until all replicas have marked the round, and take its outer step."""
        found = dict[int, Tensors]()
        ends = time.monotonic() + self.timeout
        while True:
            is_over = time.monotonic() > ends
            for replica in set(range(self.replicas)) - found.keys():
                if (delta := self.read(replica)) is not None:
                    found[replica] = delta
            missing = [replica for replica in range(self.replicas) if replica not in found]
            if not missing:
                break
            if is_over:
                names = ", ".join(map(str, missing))
                problem = (
                    f"round {self.done + 1} has no marker of replica {names} after {self.timeout:g} seconds"
                )
                raise DataError("replicas", problem, "start the missing ones again, and then this one")
            time.sleep(self.store.poll_seconds)
        take_outer_step(self.weights, self.optimizer, [found[replica] for replica in range(self.replicas)])
        self.done += 1

    def read(self, replica: int) -> Tensors | None:
        """Return the pseudo-gradient of a replica in the next round, or None if it is not marked."""
        name = name_of(self.done + 1, replica)
        try:
            marker = json.loads(self.store.read(f"{name}.json") or b"")
        except ValueError:
            return None
        for key, here in self.start.items():
            if (there := marker["start"].get(key)) != here:
                problem = f"{self.store.url} has {name}, which was made with {key} {there} and not {here}"
                remedy = "start all replicas with the same settings and weights, and a new run in a new store"
                raise ConfigError("store", problem, remedy)
        data = self.store.read(f"{name}.safetensors")
        if data is None or hashlib.sha256(data).hexdigest() != marker["sha256"]:
            return None
        return load(data)
