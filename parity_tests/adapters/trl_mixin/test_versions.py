"""What the versions of TRL differ in: each difference acts, warns or is one error. `nox -s trl_versions`."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from composer_plugins.adapters.trl_mixin import ComposerLossMixin, upstream
from composer_plugins.adapters.trl_mixin.surface import unknown_option
from composer_plugins.errors import ConfigError
from composer_plugins.findings import ComposerWarning
from composer_plugins.frameworks.trl import LOSS_OPTIONS, SINCE
from parity_tests.rigs import tiny
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.tiny import config

INSTALLED = Version(upstream.VERSION)
HALF = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}


def test_the_options_of_a_version_are_those_that_the_adapter_expects() -> None:
    """An option that the installed TRL lacks is in SINCE, with the version that brought it."""
    names = {field.name for field in fields(GRPOConfig)}
    assert {name for name, since in SINCE.items() if Version(since) <= INSTALLED} == names & set(SINCE)
    assert set(LOSS_OPTIONS) <= names | set(SINCE)


@pytest.mark.parametrize("name", SINCE)
def test_an_option_that_this_trl_lacks_names_the_version_that_has_it(name: str) -> None:
    text = f"{name}: the installed TRL {upstream.VERSION} does not have it; install trl {SINCE[name]}"
    assert str(unknown_option(name, (), {})).startswith(text)
    if Version(SINCE[name]) > INSTALLED:
        with pytest.raises(ConfigError, match=text):
            config(**{name: 0.1})


LIGER = "use_liger_kernel: TRL .* without the composer loss; set it to False"
COUNTED = "divides its {} by the tokens of all 4 micro-batches, wh"
PADDED = "beta: .* averages its KL over the padding too"
LUSPO = {"loss_type": "luspo", "beta": 0.1}
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}


@pytest.mark.parametrize(
    ("options", "since", "message"),
    [
        ({"use_liger_kernel": True, "policy": "grpo"}, "1.14", LIGER),
        ({"use_liger_kernel": True, "policy_weight": 0.5}, "1.14", LIGER),
        ({"use_liger_kernel": True, "hint_weight": 1.0}, "1.14", LIGER),
        ({"use_liger_kernel": True, "replay_weight": 1.0}, "1.14", LIGER),
        ({"use_liger_kernel": True}, "1.0", ""),
        ({**HALF, "policy": "dapo", "beta": 0.1}, "1.10", COUNTED.format("KL and entropy bonus")),
        ({**HALF, "policy": "dapo"}, "1.0", ""),
        ({**HALF, "hint_weight": 1.0}, "1.10", COUNTED.format("policy loss")),
        ({**HALF, "hint_weight": 1.0, **CISPO}, "1.10", COUNTED.format("policy loss")),
        ({**HALF, "hint_weight": 1.0, "loss_type": "grpo"}, "1.0", ""),
        ({**HALF, "loss_type": "dapo"}, "1.0", ""),
        ({"policy": "luspo", **LUSPO}, "1.10", PADDED),
        ({"policy": "grpo", **LUSPO}, "1.10", PADDED),
    ],
)
def test_what_a_trl_before_the_version_does_wrongly_is_said(
    options: dict[str, Any], since: str, message: str
) -> None:
    said: Any = nullcontext()
    if Version(since) > INSTALLED:
        said = pytest.raises(ConfigError, match=LIGER)
        said = said if message == LIGER else pytest.warns(ComposerWarning, match=message)
    with said:
        config(**options)


GONE = object()


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (upstream, "VERSION", "0.29.1", "the installed version 0.29.1 is older than 1.0; install 'trl>="),
        (utils, "pad", GONE, "the installed version .* has no pad, which this adapter reads;"),
        (utils, "_ChunkedLogProbFunction", None, ".*with Triton alone, and Triton is not installed; install"),
    ],
    ids=["older", "without a method", "without Triton"],
)
def test_a_trl_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, message: str
) -> None:
    if value is GONE:
        monkeypatch.delattr(where, name)
    else:
        monkeypatch.setattr(where, name, value, raising=False)
    with pytest.raises(ConfigError, match=f"^trl: {message}"):
        upstream.require_supported_trl()


@pytest.mark.parametrize("name", ["_compute_loss", "get_high_entropy_mask"])
def test_a_trl_whose_method_takes_others_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(GRPOTrainer, name, lambda self, loss_mask, inputs, more=None: None)
    with pytest.raises(ConfigError, match=rf"{name} takes \(loss_mask, .* relies on \((model|ent)"):
        upstream.require_supported_trl()
    monkeypatch.setattr(GRPOTrainer, name, lambda self, *args, **kwargs: None)
    upstream.require_supported_trl()  # as of a function that another package has wrapped


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


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.29.1", "trl: the installed version 0.29.1 is older than 1.0"), ("1.15.0", "with Triton alone")],
)
def test_importing_the_adapter_with_such_a_trl_is_one_error(version: str, message: str) -> None:
    """On the wheels that `nox -s trl_versions` unpacks."""
    wheel = Path(os.environ.get("TRL_WHEELS", "none"), version)
    if not wheel.is_dir():
        pytest.skip(f"TRL_WHEELS has no {version}: nox -s trl_versions")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import composer_plugins.adapters.trl_mixin"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(wheel), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("composer_plugins.errors.ConfigError: trl: ") and message in last
