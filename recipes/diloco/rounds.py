"""Rounds of DiLoCo between replicas that share nothing but an object store.

Objects in the store, none of which ever changes:

run.json                    the settings of the run and the hash of the initial weights
replicas/1-<random>.json    replica 1 joined; written again at each start
deltas/000003-1.safetensors the pseudo-gradient of replica 1 in round 3
commits/000003.json         which pseudo-gradients count in round 3, and the hashes of the result
states/000003.safetensors   weights and momentum after round 3

A replica publishes its pseudo-gradient and waits for those of the others: all that took part in the round
before, or joined since. When they are there, or the timeout is over and a quorum is there, it computes the
outer step and tries to create the commit. The store lets one commit be created per round, and every replica
takes the step that the commit describes. So they all take the same decision, whatever each of them saw, and
without comparing clocks.

A replica that starts again loads the newest state, repeats the commits after it, and trains on. A replica
that was too slow for a commit does the same; its training of that round is lost. The first replica of a
commit writes the state and deletes what the newest two states make superfluous. Commits are never deleted:
a replica that comes back after hours must not create one again.
"""

import hashlib
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import save

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.diloco.object_store import ObjectStore, stored_tensors
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    OuterState,
    Tensors,
    initial_state,
    mean,
    outer_step,
    pseudo_gradient,
    weights_hash,
)

logger = logging.getLogger(__name__)

KEPT_STATES = 2


class Commit(BaseModel, frozen=True):
    """What a round is: the replicas that count, their objects' hashes, and the hashes of the result."""

    round: int
    deltas: dict[int, str]
    weights: str
    momentum: str

    @property
    def participants(self) -> tuple[int, ...]:
        """The replicas that count, in their order."""
        return tuple(sorted(self.deltas))

    def results_in(self, state: OuterState) -> bool:
        """Whether this is the state after the round."""
        return (self.weights, self.momentum) == (weights_hash(state.weights), weights_hash(state.momentum))

    @classmethod
    def of(cls, data: bytes, name: str) -> "Commit":
        """Parse the object, or raise DataError."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            raise DataError(name, "it is not a commit of this recipe", "name an empty store") from None


class DeltaDeletedError(Exception):
    """A pseudo-gradient of an old round was deleted, because a newer state exists."""


class Rounds:
    """The rounds of a run, as one of its replicas sees them."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        replica: int,
        replicas: int,
        quorum: int,
        timeout: float,
        outer: OuterOptimizer,
    ) -> None:
        if not 0 <= replica < replicas:
            raise ConfigError("replica", f"it is {replica}", f"number the {replicas} replicas from 0")
        if not 0 < quorum <= replicas:
            raise ConfigError("quorum", f"it is {quorum}", f"set a number from 1 to {replicas}")
        self.store, self.replica, self.replicas, self.quorum = store, replica, replicas, quorum
        self.timeout, self.outer = timeout, outer
        self.round = 0  # the round that comes next
        self.state = OuterState({}, {})  # with which it starts
        self.unreadable: dict[str, str] = {}  # objects, and what is wrong with them
        self.participants = set(range(replicas))  # of the round before
        self.records = set[str]()  # of joining, when the round before ended

    # Joining

    def join(self, weights: Tensors, settings: Mapping[str, Any]) -> None:
        """Compare the run with the store's, wait for the replicas, and load the last committed round."""
        self.state = initial_state(weights)
        run = {
            **settings,
            "replicas": self.replicas,
            "quorum": self.quorum,
            "outer": vars(self.outer),
            "initial_weights": weights_hash(weights),
        }
        self.compare(run, self.store.create("run.json", as_json(run)))
        if not self.record():
            problem = f"{self.store.url} creates an object that exists, so two replicas could commit a round"
            raise ConfigError("store", problem, "name a store that has conditional writes")
        self.catch_up()
        if self.round == 0:
            self.wait_for_replicas()
        if self.store.read(self.delta_name(self.replica)) is not None:
            # This replica stopped after it had published: the training of this round is in the store.
            self.conclude()

    def record(self) -> bool:
        """Record that this replica takes part, and return whether the store creates exclusively."""
        name, data = f"replicas/{self.replica}-{uuid.uuid4().hex}.json", b"{}"
        self.store.create(name, data)
        return self.store.create(name, b"[]") == data

    def compare(self, run: Mapping[str, Any], data: bytes) -> None:
        """Raise ConfigError if the store belongs to a run with other settings."""
        try:
            there = json.loads(data)
        except ValueError:
            there = None
        if not isinstance(there, dict) or not there.keys() >= {"replicas", "initial_weights"}:
            problem = f"run.json in {self.store.url} is not of this recipe"
            raise ConfigError("store", problem, "name an empty store")
        for key, value in run.items():
            if there.get(key) != value:
                problem = f"{self.store.url} belongs to another run: {key} is {there.get(key)} there and "
                problem += f"{value} here"
                raise ConfigError("store", problem, "start every replica with the same settings and weights")

    def wait_for_replicas(self) -> None:
        """Wait until every replica has joined."""
        began = time.monotonic()
        while True:
            joined = {number_of(name) for name in self.store.names("replicas")}
            if len(joined) == self.replicas or self.read_commit(0):
                return
            if time.monotonic() - began > self.timeout:
                for name in self.store.names("replicas"):  # or this replica would count as there
                    if number_of(name) == self.replica:
                        self.store.delete(name)
                problem = f"{len(joined)} of {self.replicas} joined within {self.timeout:g} seconds"
                raise DataError(
                    "replicas", problem, "start the others, or correct the number on each of them"
                )
            time.sleep(self.store.poll_seconds)

    def catch_up(self) -> None:
        """Load the newest state and repeat the commits after it."""
        while True:
            commits = [number_of(name) for name in self.store.names("commits")]
            last = max(commits, default=-1)
            if last < self.round:
                return
            states = [number_of(name) for name in self.store.names("states")]
            newest = max((number for number in states if number <= last), default=-1)
            if newest >= self.round:
                self.state, self.round = self.read_state(newest), newest + 1
            try:
                while self.round <= last:
                    self.apply(self.commit(self.round), {})
            except DeltaDeletedError as error:
                if not any(number_of(name) >= self.round for name in self.store.names("states")):
                    problem = f"{error} is missing or changed, and no state after it is in the store"
                    raise DataError("store", problem, "restore the object, or start a new run") from None
                continue
            return

    # A round

    def synchronise(self, local: Tensors) -> list[Commit]:
        """Publish what this replica trained, and return the commits up to which it is then.

        There is more than one if this replica was too slow.
        """
        delta = pseudo_gradient(self.state.weights, local)
        if not all(torch.isfinite(value).all() for value in delta.values()):
            problem = f"this replica's weights are not finite after round {self.round + 1}"
            raise DataError("model", problem, "lower the learning rate, and start the replica again")
        data = save(delta)
        name = self.delta_name(self.replica)
        if self.store.create(name, data) != data:
            problem = f"another process publishes as replica {self.replica}"
            raise DataError("replica", problem, "give every replica a number of its own")
        return self.conclude()

    def conclude(self) -> list[Commit]:
        """Wait for the commit of this round, or create it; then take its step."""
        began, found, first = time.monotonic(), dict[int, tuple[str, Tensors]](), self.round
        records = self.new_records()
        while True:
            commit = self.read_commit(self.round)
            if commit is None:
                for replica in set(range(self.replicas)) - found.keys():
                    if delta := self.read_delta(replica):
                        found[replica] = delta
                is_over = time.monotonic() - began > self.timeout
                # Those that took part in the round before, or joined since it ended.
                awaited = self.participants | {number_of(name) for name in self.new_records()}
                if len(found) >= self.quorum and (is_over or found.keys() >= awaited):
                    commit = self.propose(found)
                elif is_over:
                    raise self.too_few(found)
            if commit is None:
                time.sleep(self.store.poll_seconds)
                continue
            if missing := self.participants - commit.deltas.keys() - {self.replica}:
                logger.warning(
                    "round %d was committed without replica %s, whose training did not arrive in time; later "
                    "rounds do not wait for it until it joins again",
                    commit.round + 1,
                    ", ".join(map(str, sorted(missing))),
                )
            try:
                self.apply(commit, found)
            except DeltaDeletedError:
                self.catch_up()
            else:
                self.clean(commit)
            if self.replica not in commit.deltas:
                logger.warning(
                    "round %d was committed without replica %d, whose training of this round is lost",
                    commit.round + 1,
                    self.replica,
                )
                self.catch_up()  # the others may be further
                self.record()
            self.records |= records
            return [self.commit(number) for number in range(first, self.round)]

    def new_records(self) -> set[str]:
        """The names of the records that were not there when the round before ended."""
        return set(self.store.names("replicas")) - self.records

    def propose(self, found: Mapping[int, tuple[str, Tensors]]) -> Commit:
        """Create the commit of this round, and return it, or another replica's if that was faster."""
        state = self.next_state([found[replica][1] for replica in sorted(found)])
        hashes = {replica: found[replica][0] for replica in sorted(found)}
        weights, momentum = weights_hash(state.weights), weights_hash(state.momentum)
        commit = Commit(round=self.round, deltas=hashes, weights=weights, momentum=momentum)
        name = commit_name(self.round)
        return Commit.of(self.store.create(name, commit.model_dump_json(indent=1).encode()), name)

    def apply(self, commit: Commit, found: Mapping[int, tuple[str, Tensors]]) -> None:
        """Take the step of a commit."""
        gradients = []
        for replica in commit.participants:
            delta = found.get(replica) or self.read_delta(replica)
            if delta is None or delta[0] != commit.deltas[replica]:
                raise DeltaDeletedError(self.delta_name(replica))
            gradients.append(delta[1])
        state = self.next_state(gradients)
        if not commit.results_in(state):
            weights = f"the weights of replica {self.replica} after round {commit.round + 1}"
            remedy = "install the same build of torch everywhere, since other builds round differently"
            raise DataError("weights", f"{weights} are not those of the commit", remedy)
        self.state, self.round, self.participants = state, commit.round + 1, set(commit.participants)
        self.unreadable.clear()

    def next_state(self, gradients: list[Tensors]) -> OuterState:
        """Return the state after a step with these pseudo-gradients."""
        return outer_step(self.state, mean(gradients), self.outer)

    def clean(self, commit: Commit) -> None:
        """Write the state, and delete older objects, if that is this replica's part."""
        if self.replica != commit.participants[0]:
            return
        tensors = {f"weights/{name}": tensor for name, tensor in self.state.weights.items()}
        tensors |= {f"momentum/{name}": tensor for name, tensor in self.state.momentum.items()}
        self.store.create(state_name(commit.round), save(tensors))
        states = self.store.names("states")
        if len(states) < KEPT_STATES:
            return
        oldest_kept = number_of(states[-KEPT_STATES])
        for name in states:
            if number_of(name) < oldest_kept:
                self.store.delete(name)
        for name in self.store.names("deltas"):
            if number_of(name) <= oldest_kept:
                self.store.delete(name)

    # Objects

    def delta_name(self, replica: int) -> str:
        """The pseudo-gradient of a replica in this round."""
        return f"deltas/{self.round:06d}-{replica}.safetensors"

    def read_delta(self, replica: int) -> tuple[str, Tensors] | None:
        """Return the hash of the object and its tensors, or None if it is not there or not readable."""
        name = self.delta_name(replica)
        if name in self.unreadable or (data := self.store.read(name)) is None:
            return None
        if (tensors := stored_tensors(data)) is None:
            self.reject(name, "is cut off or not a safetensors file")
        elif signature(tensors) != signature(self.state.weights):
            self.reject(name, "has other tensors than this model")
        else:
            return hashlib.sha256(data).hexdigest(), tensors
        return None

    def reject(self, name: str, problem: str) -> None:
        """Count the replica as missing in this round."""
        logger.warning("%s in %s %s; its replica does not count in this round", name, self.store.url, problem)
        self.unreadable[name] = problem

    def read_commit(self, number: int) -> Commit | None:
        """Return the commit of a round, or None if there is none yet."""
        name = commit_name(number)
        data = self.store.read(name)
        return None if data is None else Commit.of(data, name)

    def commit(self, number: int) -> Commit:
        """Return the commit of a round that has one."""
        if commit := self.read_commit(number):
            return commit
        problem = f"{commit_name(number)} is missing in {self.store.url}"
        raise DataError("store", problem, "restore the object, or start a new run")

    def read_state(self, number: int) -> OuterState:
        """Return a state, after comparing it with its commit."""
        name, commit = state_name(number), self.commit(number)
        tensors = stored_tensors(self.store.read(name) or b"")
        if tensors is not None:
            parts = defaultdict[str, Tensors](dict)
            for key, tensor in tensors.items():
                part, _, parameter = key.partition("/")
                parts[part][parameter] = tensor
            state = OuterState(parts["weights"], parts["momentum"])
            if commit.results_in(state):
                return state
        problem = f"{name} in {self.store.url} is cut off or changed"
        raise DataError("store", problem, "delete it: the state before it is then used")

    def too_few(self, found: Mapping[int, Any]) -> DataError:
        """The error for a round that too few replicas have finished."""
        missing = ", ".join(str(replica) for replica in range(self.replicas) if replica not in found)
        problem = f"{len(found)} finished round {self.round + 1} within {self.timeout:g} seconds, and "
        problem += f"{self.quorum} are needed; missing: {missing}"
        problem += "".join(f" ({name} {what})" for name, what in self.unreadable.items())
        return DataError("replicas", problem, "start the missing ones again, and then this one")


def as_json(data: Mapping[str, Any]) -> bytes:
    """The same bytes for the same data."""
    return json.dumps(data, sort_keys=True, indent=1).encode()


def commit_name(number: int) -> str:
    """The commit of a round."""
    return f"commits/{number:06d}.json"


def state_name(number: int) -> str:
    """The state after a round."""
    return f"states/{number:06d}.safetensors"


def number_of(name: str) -> int:
    """The number in the name of an object: its round, or of a record the replica."""
    digits = PurePath(name).stem.partition("-")[0]
    return int(digits) if digits.isdigit() else -1


def signature(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and dtypes."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
