"""Which versions of TRL are accepted, and what a later one may pass on. `nox -s trl_versions`."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerLossMixin, upstream
from composer_plugins.errors import ComposerWarning
from composer_plugins.frameworks.trl import LOSS_OPTIONS
from parity_tests.rigs import tiny


def test_this_trl_has_every_option_of_the_table() -> None:
    assert {*LOSS_OPTIONS} <= {one.name for one in fields(GRPOConfig)}


class Annealed(GRPOTrainer):
    """A trainer of a later TRL, whose methods take more."""

    def _compute_loss(self, model: Any, inputs: Any, scale: float = 1.0) -> Any:
        return scale * super()._compute_loss(model, inputs)


class Composed(ComposerLossMixin, Annealed):
    """The channels in front of it."""


def test_what_a_later_trl_passes_is_passed_on() -> None:
    trainer = tiny.trainer(cls=Composed)
    inputs = tiny.batch(trainer)
    loss = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(trainer._compute_loss(trainer.model, inputs, 2.0), 2 * loss)
    torch.testing.assert_close(trainer._compute_loss(trainer.model, inputs, scale=3.0), 3 * loss)


def test_a_newer_trl_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.trainer()
    monkeypatch.setattr(upstream, "VERSION", "1.17.0.dev0")
    with pytest.warns(ComposerWarning, match=r"^trl: the installed version 1.17.0.dev0 is newer .* 1.16"):
        tiny.trainer()


PATCHED = upstream.TESTED[-1].rpartition(".")[0] + ".9"


@pytest.mark.parametrize("version", ["1.16.0-mine", "1.9.0+local", "1.16.1.post1", "unknown", PATCHED])
def test_the_version_of_a_fork_or_a_patch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(upstream, "VERSION", version)
    assert not upstream.is_newer_than_tested()
