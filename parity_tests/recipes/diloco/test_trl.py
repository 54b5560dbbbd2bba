"""TRL's trainer with all three channels in two processes: every round is that of one process."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco import Replica
from composer_plugins.recipes.diloco.__main__ import lighthouse_on_this_machine
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, Round, number_of_rounds
from composer_plugins.recipes.diloco.launching import started
from composer_plugins.recipes.diloco.outer import (
    OuterOptimizer,
    OuterState,
    Tensors,
    initial_state,
    load_weights,
    mean,
    outer_step,
    pseudo_gradient,
    trained_weights,
    weights_hash,
)
from composer_plugins.recipes.diloco.replica import train_replica

REPLICAS, STEPS, SYNC_EVERY = 2, 6, 2


def rng_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_rng_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


class Turns:
    """Lets threads run one at a time, each with the random numbers of a process of its own."""

    def __init__(self, count: int) -> None:
        self.count, self.turn, self.condition = count, 0, threading.Condition()
        self.states: dict[int, tuple[Any, ...]] = {}
        self.local: dict[int, Tensors] = {}
        self.outer: OuterState | None = None

    @contextmanager
    def taken(self, number: int) -> Iterator[None]:
        self.wait(number)
        try:
            yield
        finally:
            self.pass_on(number)

    def wait(self, number: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.turn == number, timeout=240)
        if number in self.states:
            set_rng_state(self.states[number])

    def pass_on(self, number: int) -> None:
        self.states[number] = rng_state()
        with self.condition:
            self.turn = (number + 1) % self.count
            self.condition.notify_all()


class InOneProcess(OuterCallback):
    """The algorithm without a transport: the last replica takes the outer step for all."""

    def __init__(self, number: int, turns: Turns, on_round: OnRound) -> None:
        super().__init__(SYNC_EVERY, OuterOptimizer(), on_round)
        self.number, self.turns, self.done = number, turns, 0

    def start(self, optimizer: Any) -> None:
        if self.turns.outer is None:
            self.turns.outer = initial_state(trained_weights(self.model))

    def synchronise(self) -> None:
        turns = self.turns
        turns.local[self.number] = trained_weights(self.model)
        assert turns.outer is not None
        if len(turns.local) == turns.count:
            gradients = [pseudo_gradient(turns.outer.weights, turns.local[i]) for i in range(turns.count)]
            turns.outer = outer_step(turns.outer, mean(gradients), self.outer)
            turns.local.clear()
        turns.pass_on(self.number)
        turns.wait(self.number)
        load_weights(self.model, turns.outer.weights)
        self.done += 1
        self.report(Round(self.done, ("0", "1"), weights_hash(turns.outer.weights)))

    def committed(self) -> int:
        return self.done


@pytest.fixture(scope="module")
def reference() -> dict[int, list[dict[str, Any]]]:
    """What the replicas report when they train in this process, in turns."""
    turns, events = Turns(REPLICAS), {replica: list[dict[str, Any]]() for replica in range(REPLICAS)}
    failed = []

    def run(replica: int) -> None:
        options = Replica(replica, REPLICAS, STEPS, SYNC_EVERY, 0, 60.0)
        try:
            with turns.taken(replica):
                train_replica(
                    options,
                    events[replica].append,
                    lambda _, on_round: InOneProcess(replica, turns, on_round),
                )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    assert not failed, failed
    return events


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torchft", "store"])
def test_the_three_channels_in_two_processes_equal_one(
    transport: str, reference: dict[int, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Weights after each round, rewards of each step and the accuracy at the end; as the demo starts them."""
    options = Replica(0, REPLICAS, STEPS, SYNC_EVERY, 0, 120.0)
    with ExitStack() as stack:
        if transport == "torchft":
            lighthouse = stack.enter_context(lighthouse_on_this_machine())
            options = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        else:
            options = replace(options, store=str(tmp_path / "store"))
        events = list(stack.enter_context(started(options)))
    for replica in range(REPLICAS):
        own = [event for event in events if event["replica"] == replica]
        result, expected = own[-1], reference[replica][-1]
        rounds = [(event["number"], event["weights"], event["reward"]) for event in own[:-1]]
        assert rounds == [(one["number"], one["weights"], one["reward"]) for one in reference[replica][:-1]]
        assert len(rounds) == STEPS // SYNC_EVERY
        assert [result[key] for key in ("rewards", "greedy")] == [
            expected[key] for key in ("rewards", "greedy")
        ]


def arguments(**changed: Any) -> tuple[Any, Any]:
    args = SimpleNamespace(world_size=changed.get("world_size", 1), fp16=changed.get("fp16", False))
    return args, SimpleNamespace(
        max_steps=changed.get("max_steps", 8), global_step=changed.get("global_step", 0)
    )


def test_the_number_of_rounds() -> None:
    assert [number_of_rounds(*arguments(), every) for every in (1, 2, 4, 8)] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_steps": 7}, "max_steps: 7 is not a multiple of sync_every = 4, .*; set it to 4 or 8"),
        ({"max_steps": 3}, "max_steps: 3 is not a multiple of sync_every = 4, .*; set it to 4"),
        ({"world_size": 2}, "world_size: the trainer has 2 processes"),
        ({"fp16": True}, "fp16: the gradient scaler skips steps"),
        ({"global_step": 4}, "resume_from_checkpoint: training resumes at step 4"),
    ],
)
def test_options_that_do_not_go_with_diloco_are_errors(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        number_of_rounds(*arguments(**changed), 4)


def test_the_trainer_options_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo

    diloco = ObjectStoreDiLoCo(store=str(tmp_path), replica=0, replicas=1, sync_every=4)
    with pytest.raises(ConfigError, match="max_steps"):
        diloco.on_train_begin(*arguments(max_steps=7), None, model=torch.nn.Linear(1, 1))
    assert not (tmp_path / "run.json").exists()
    with pytest.raises(ConfigError, match="sync_every: it is 0"):
        ObjectStoreDiLoCo(store=str(tmp_path), replica=0, replicas=1, sync_every=0)


def test_a_replica_that_joins_when_the_run_is_over_has_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so. The trainer takes one step before it looks whether it should stop."""
    from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo

    def make() -> ObjectStoreDiLoCo:
        return ObjectStoreDiLoCo(store=str(tmp_path), replica=0, replicas=1, sync_every=1, timeout=5.0)

    def step(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)

    model, again = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    again.load_state_dict(model.state_dict())
    args, state = arguments(max_steps=2)
    for diloco, own, steps in ((make(), model, 2), (make(), again, 1)):
        control = SimpleNamespace(should_training_stop=False)
        diloco.on_train_begin(args, state, control, model=own)
        assert control.should_training_stop == (own is again)
        for _ in range(steps):
            step(own)
            diloco.on_step_end(args, state, control)
        assert control.should_training_stop
        assert ("the run is over: all 2 rounds were committed" in caplog.text) == (own is again)
    assert weights_hash(trained_weights(again)) == weights_hash(trained_weights(model))
