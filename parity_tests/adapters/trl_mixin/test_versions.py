"""Which versions of TRL are accepted, and what a later one may pass on. `nox -s trl_versions`."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerLossMixin, upstream
from composer_plugins.errors import ComposerWarning, ConfigError
from composer_plugins.frameworks.trl import LOSS_OPTIONS
from parity_tests.rigs import tiny
from parity_tests.rigs.paths import ROOT


def test_a_trl_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "VERSION", "1.8.3")
    with pytest.raises(ConfigError, match="^trl: the installed version 1.8.3 is older than 1.9; install"):
        upstream.require_supported_trl()


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
    upstream.require_supported_trl()
    assert not upstream.is_newer_than_tested()


def test_importing_the_adapter_with_such_a_trl_is_one_error() -> None:
    """On the wheel that `nox -s trl_versions` unpacks."""
    wheel = Path(os.environ.get("TRL_WHEELS", "none"), "1.8.0")
    if not wheel.is_dir():
        pytest.skip("TRL_WHEELS has no 1.8.0: nox -s trl_versions")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import composer_plugins.adapters.trl_mixin"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(wheel), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("composer_plugins.errors.ConfigError: trl: the installed version 1.8.0 is older")
