"""TRL's trainer with all three channels in two processes, and the callback's options."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco import Replica
from composer_plugins.recipes.diloco.__main__ import lighthouse_on_this_machine
from composer_plugins.recipes.diloco.callback import number_of_rounds
from composer_plugins.recipes.diloco.launching import started
from composer_plugins.recipes.diloco.outer import trained_weights, weights_hash
from composer_plugins.recipes.diloco.store_callback import ObjectStoreDiLoCo

REPLICAS, STEPS, SYNC_EVERY = 2, 6, 2


@pytest.mark.slow
def test_the_three_channels_have_the_same_rounds_over_both_transports(tmp_path: Path) -> None:
    """Weights after each round, rewards of each step and the accuracy at the end; as the demo starts them.

    test_torchft.py compares the rounds of torchft with a training in one process.
    """
    options, found = Replica(0, REPLICAS, STEPS, SYNC_EVERY, 0, 120.0), []
    with lighthouse_on_this_machine() as lighthouse:
        over_torchft = replace(options, lighthouse=lighthouse, host="127.0.0.1")
        for one in (over_torchft, replace(options, store=str(tmp_path / "store"))):
            with started(one) as run:
                events = list(run)
            of_replicas = [[one for one in events if one["replica"] == i] for i in range(REPLICAS)]
            rounds = [
                [(one["number"], one["weights"], one["reward"]) for one in of[:-1]] for of in of_replicas
            ]
            found.append((rounds, [(of[-1]["rewards"], of[-1]["greedy"]) for of in of_replicas]))
    assert found[0] == found[1]
    weights = [[one[1] for one in rounds] for rounds in found[0][0]]
    assert weights[0] == weights[1] and len(set(weights[0])) == STEPS // SYNC_EVERY
    assert found[0][1][0] != found[0][1][1]  # each replica has rollouts of its own


def arguments(**changed: Any) -> tuple[Any, Any]:
    """The arguments and the state of a trainer."""
    given = SimpleNamespace(**{"world_size": 1, "fp16": False, "max_steps": 8, "global_step": 0} | changed)
    return given, given


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
