"""`composer-plugins doctor --verl` asks a real interpreter: what its verl imports, registers and composes.

Each question takes as long as `import verl`; without_verl/test_doctor.py tests what is made of the answers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from composer_plugins.adapters.verl_plugin import doctor as verl_doctor
from composer_plugins.adapters.verl_plugin.doctor import probe
from composer_plugins.adapters.verl_plugin.options import TARGET
from composer_plugins.adapters.verl_plugin.upstream import PLUGIN
from composer_plugins.doctor import Target, ask
from composer_plugins.errors import Finding
from parity_tests.cases.verl_config import LOSS, changed
from parity_tests.rigs.paths import ROOT

MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
LEGACY = "trainer.use_v1=False"  # so that TransferQueue is not asked for
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"  # otherwise verl asks for the sizes of micro-batches
GROUPS = "actor_rollout_ref.rollout.n=8"  # verl's default is 1
ENGINE = "actor_rollout_ref.rollout.name=vllm"  # which verl leaves open

FILE = changed(
    {"defaults": ["ppo_trainer", "_self_"]},
    {
        "algorithm.adv_estimator": "composer",
        "algorithm.composer": {"policy": "cispo", "policy_params": {"clip_high": 4.0}},
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        LOSS: {"_target_": TARGET, "loss_mode": "composer", "composer": "${algorithm.composer}"},
    },
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """None of verl's variables; the folder that is returned is on the interpreter's path."""
    for name in (MODULES, PLUGINS):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    return folder


def found(*overrides: str) -> list[Finding]:
    return list(verl_doctor.examine([], Target(sys.executable, None, overrides)).findings)


def without(name: str, environment: Path) -> None:
    """Let an interpreter find nothing in this module of our plugin."""
    module = PLUGIN.replace("register", name)
    lines = f"import sys, types\nsys.modules['{module}'] = types.ModuleType('{module}')"
    (environment / "sitecustomize.py").write_text(lines)


def test_a_file_is_composed_as_main_ppo_composes_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(FILE))
    target = Target(sys.executable, None, (LEGACY,))
    request = json.dumps(verl_doctor.request_of((file,), target))
    facts = ask(sys.executable, Path(probe.__file__), request)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(file.parent)]
    command += ["--config-name", file.stem, LEGACY, "--cfg", "job"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=file.parent).stdout
    theirs = yaml.safe_load(shown)
    assert facts["config"]["algorithm"] == theirs["algorithm"]
    assert facts["config"]["trainer"]["use_v1"] is theirs["trainer"]["use_v1"] is False
    assert theirs["actor_rollout_ref"]["actor"]["policy_loss"]["composer"] == "${algorithm.composer}"
    sent = facts["config"]["actor_rollout_ref"]["actor"]["policy_loss"]["composer"]
    assert sent == {"policy": "cispo", "policy_params": {"clip_high": 4.0}}
    assert list(verl_doctor.judge(facts, sys.executable)) == []
    assert {"composer", "composer/rloo", "gae"} <= set(facts["estimators"])
    assert {"composer", "composer/cispo", "vanilla"} <= set(facts["losses"])


def test_what_main_ppo_refuses_is_an_error_in_its_words() -> None:
    (one,) = found("algorithm.adv_estimater=composer", LEGACY)
    assert (one.key, one.severity) == ("hydra", "error") and "algorithm.adv_estimater" in one.problem
    name, sizes = found("algorithm.adv_estimator=composer/rlo", LEGACY)
    assert (name.key, name.remedy) == ("algorithm.adv_estimator", "did you mean 'composer/rloo'?")
    assert sizes.key == "main_ppo" and "ppo_micro_batch_size" in sizes.problem


def test_verl_that_does_not_import_is_an_error(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "broken.py").write_text("raise SystemExit('no')")
    monkeypatch.setenv(MODULES, "broken")
    (one,) = found("algorithm.adv_estimator=composer", LEGACY)
    assert one.key == "verl" and "import verl fails in" in one.problem and "SystemExit: no" in one.problem


def test_a_plugin_that_is_not_allowed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "none")
    (one,) = found("algorithm.adv_estimator=composer", LEGACY, DYNAMIC, GROUPS, ENGINE)
    assert (one.key, one.severity) == (MODULES, "error") and f"export {MODULES}={PLUGIN}" in one.remedy


def test_a_plugin_that_fails_is_heard(environment: Path) -> None:
    """verl swallows its error."""
    without("estimators", environment)
    (one,) = found()
    assert (one.key, one.severity) == ("verl.plugins", "error")
    assert "cannot import name 'estimator'" in one.problem


def test_a_trainer_that_does_not_load_is_found_where_the_config_names_it(environment: Path) -> None:
    without("sync_trainer.loss", environment)
    sync = ("algorithm.adv_estimator=composer", "trainer.v1.trainer_mode=composer_sync", DYNAMIC)
    (one,) = (one for one in found(*sync) if one.key == "verl.plugins")
    assert one.severity == "error" and "cannot import name 'ComposerLoss'" in one.problem


def test_both_channels_in_our_trainer_have_no_finding() -> None:
    sound = (
        DYNAMIC,
        GROUPS,
        ENGINE,
        "algorithm.adv_estimator=composer",
        "trainer.v1.trainer_mode=composer_sync",
        "+algorithm.composer.hint_weight=0.1",
        "+algorithm.composer.hint_divergence=sampled_token",
        "+algorithm.composer.replay_weight=1",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0",
    )
    assert found(*sound) == []


def test_the_installed_command_asks_an_interpreter_without_verl(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\ncd / && exec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    command = [sys.executable, "-m", "composer_plugins", "doctor", "--verl", "--python", str(bare)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"{bare}, which will train, has no verl" in run.stdout
    assert f"{bare}, which will train, cannot import composer-plugins" in run.stdout
