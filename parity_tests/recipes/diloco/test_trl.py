"""TRL's trainer with all three channels in two processes, and the callback's options."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.callback import number_of_rounds
from composer_plugins.recipes.diloco.launching import Replica, run_replicas
from composer_plugins.recipes.diloco.on_this_machine import LocalJob, ThisMachine, lighthouse_on_this_machine
from composer_plugins.recipes.diloco.outer import trained_weights, weights_hash
from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo

REPLICAS, STEPS, SYNC_EVERY = 2, 6, 2


@pytest.mark.slow
def test_the_three_channels_have_the_same_rounds_over_both_transports(tmp_path: Path) -> None:
    """Weights and rewards of each round, and the accuracy at the end; as the demo starts them.

    test_rounds.py and test_torchft.py compare the rounds with a training in one process.
    """
    options, found = Replica(0, REPLICAS, STEPS, SYNC_EVERY, 0, 120.0), []
    with lighthouse_on_this_machine() as lighthouse:
        over_torchft = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        for one in (over_torchft, replace(options, store=str(tmp_path / "store"))):
            lines: list[dict[str, Any]] = []
            assert run_replicas(one, ThisMachine(), lines.append) == [0, 0]
            found.append([[line for line in lines if line["replica"] == i] for i in range(REPLICAS)])
    assert found[0] == found[1]
    weights = [[line["weights"] for line in lines if "round" in line] for lines in found[0]]
    assert weights[0] == weights[1] and len(set(weights[0])) == STEPS // SYNC_EVERY
    rewards = [[line["reward"] for line in lines if "round" in line] for lines in found[0]]
    assert rewards[0] != rewards[1]  # each replica has rollouts of its own


class Watched(ThisMachine):
    """This machine, which shows its jobs."""

    def __init__(self) -> None:
        self.jobs: list[LocalJob] = []

    def start(self, options: Replica) -> LocalJob:
        self.jobs.append(super().start(options))
        return self.jobs[-1]


@pytest.mark.slow
def test_a_replica_that_is_killed_at_round_2_is_started_again(tmp_path: Path) -> None:
    """Of three. It repeats what it had marked, and all end with the same weights."""
    options, platform = Replica(0, 3, STEPS, SYNC_EVERY, 0, 120.0, store=str(tmp_path / "store")), Watched()
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        if (line["replica"], line.get("round")) == (1, 2) and len(platform.jobs) == 3:
            platform.jobs[1].process.kill()

    assert run_replicas(options, platform, report) == [0, 0, 0]
    assert [job.process.returncode for job in platform.jobs] == [0, -signal.SIGKILL, 0, 0]
    rounds = [(line["round"], line["replica"], line["weights"]) for line in lines if "round" in line]
    weights = {number: one for number, _, one in rounds}
    assert set(rounds) == {(number, replica, one) for number, one in weights.items() for replica in range(3)}
    assert sorted(weights) == [1, 2, 3] and len(rounds) == 11  # rounds 1 and 2 of replica 1 twice


def arguments(**changed: Any) -> tuple[Any, Any]:
    """The arguments and the state of a trainer."""
    given = SimpleNamespace(**{"world_size": 1, "max_steps": 8, "global_step": 0} | changed)
    return given, given


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_steps": 7}, "max_steps: 7 is not a multiple of sync_every = 4; set it to 8"),
        ({"world_size": 2}, "world_size: the trainer has 2 processes"),
        ({"global_step": 4}, "resume_from_checkpoint: training resumes at step 4"),
    ],
)
def test_options_that_do_not_go_with_diloco_are_errors(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        number_of_rounds(*arguments(**changed), 4)


def train(store: Path, max_steps: int, steps: int) -> str:
    """Train the only replica for so many steps, until it should stop; return the hash of its weights."""
    diloco = ObjectStoreDiLoCo(store=str(store), replica=0, replicas=1, sync_every=1)
    model, control = torch.nn.Linear(2, 1), SimpleNamespace(should_training_stop=False)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    args, state = arguments(max_steps=max_steps)
    diloco.on_train_begin(args, state, control, model=model)
    for _ in range(steps):
        assert not control.should_training_stop
        with torch.no_grad():
            model.weight.add_(1.0)
        diloco.on_step_end(args, state, control)
    assert control.should_training_stop
    return weights_hash(trained_weights(model))


def test_a_replica_that_starts_when_the_run_is_over_has_its_weights(tmp_path: Path) -> None:
    """The trainer takes one step before it looks whether it should stop."""
    assert train(tmp_path, max_steps=2, steps=2) == train(tmp_path, max_steps=2, steps=1)


def test_a_run_goes_on_with_more_steps_and_not_with_fewer(tmp_path: Path) -> None:
    train(tmp_path / "short", max_steps=2, steps=2)
    assert train(tmp_path / "short", max_steps=4, steps=2) == train(tmp_path / "long", max_steps=4, steps=4)
    said = (
        "max_steps: training would end after round 2, and .* has more; set at least as many steps as before"
    )
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "short", max_steps=2, steps=1)
