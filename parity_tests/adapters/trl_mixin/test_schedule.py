"""Weights that a callback changes during training act from the next step on, and are resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from composer_plugins.errors import ConfigError
from parity_tests.rigs import tiny

BOTH = {"hint_weight": 1.0, "replay_weight": 0.5}


class Sets(TrainerCallback):
    """Sets options when this step begins."""

    def __init__(self, step: int, **options: Any) -> None:
        self.step, self.options = step, options

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            vars(args).update(self.options)


def trained(callback: Sets | None = None, saved: str | None = None, **options: Any) -> list[torch.Tensor]:
    made = tiny.trainer(**{"max_steps": 3, **BOTH, **options})
    if callback is not None:
        made.add_callback(callback)
    recorder = tiny.GradientRecorder()
    made.add_callback(recorder)
    made.train(resume_from_checkpoint=saved)
    return recorder.gradients


def test_a_weight_that_a_callback_changes_acts_from_that_step_on() -> None:
    plain, changed = trained(), trained(Sets(1, hint_weight=0.0, replay_weight=0.0))
    assert torch.equal(plain[0], changed[0]) and not torch.equal(plain[1], changed[1])
    off = trained(Sets(0, hint_weight=0.0, replay_weight=0.0))
    assert all(map(torch.equal, off, trained(hint_weight=0.0, replay_weight=0.0)))


def test_a_changed_weight_is_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    options["dataset"] = tiny.rows(16)
    whole = trained(Sets(1, hint_weight=0.25), **options)
    saved = str(tmp_path / "checkpoint-2")
    assert torch.equal(trained(saved=saved, **options)[0], whole[2])
    other = trained(saved=saved, **options, hint_weight=0.5)  # what the user has written since stands
    assert not torch.equal(other[0], whole[2])


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"hint_weight": 0.0}, {"hint_weight": 1.0}, "hint_weight: it was 0 when .* is 1.0; make"),
        ({}, {"hint_weight": -1.0}, "hint_weight: it is -1.0; set a"),
        ({}, {"replay_weight": "x"}, "replay_weight: it is 'x'; set a"),
        ({}, {"hint_divergence": "sdpo"}, "hint_divergence: it was 'jsd' .* 'sdpo'; make a new trainer"),
    ],
)
def test_a_change_that_cannot_act_is_an_error(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        trained(Sets(0, **changes), max_steps=1, **options)
