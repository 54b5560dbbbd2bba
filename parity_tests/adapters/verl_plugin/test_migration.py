"""`composer-plugins migrate` from and to verl: its defaults, and values that only verl itself can judge."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import verl
import yaml
from omegaconf import OmegaConf
from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

from composer_plugins.adapters.verl_plugin import migration
from composer_plugins.config import at
from composer_plugins.frameworks.verl import Key
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.objective import of_choice
from composer_plugins.objective.resolve import migrate, resolve

TREES = sorted((Path(verl.__file__).parent / "trainer" / "config").glob("_generated_ppo_*.yaml"))


@pytest.mark.parametrize("file", TREES, ids=lambda file: file.stem)
def test_verls_own_defaults_are_read_and_nothing_of_them_differs(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    tree["algorithm"]["adv_estimator"] = "grpo"
    read = resolve("verl", tree)
    assert migrate(read.required(), "verl").differences == ()


def test_omegaconf_calls_the_value_missing_that_stands_for_a_policy_loss() -> None:
    orchestrator = {"algo": {"type": "opd"}, "group_size": 8}
    found = migrate(resolve("prime-rl", {"orchestrator": orchestrator}).required(), "verl")
    config = OmegaConf.create(found.text)
    assert config.actor_rollout_ref.rollout.n == 8
    assert OmegaConf.missing_keys(config) == {"algorithm.composer.policy"}


def test_verl_takes_the_threshold_of_a_mask_without_a_lower_bound() -> None:
    mask = choose("correction", "mis", {"high": 3.0, "log_ratio_clamp": 20.0})
    objective = replace(of_choice(choose("policy", "grpo@verl")), correction=mask)
    written = migration.write(objective)
    upper, lower = _parse_rollout_is_threshold(at(written, f"{Key.CORRECTION}.rollout_is_threshold"))
    assert upper == 3.0 and lower is not None and 0 < lower < math.exp(-20)
    read = migration.read(written)[0].correction
    assert read is not None and read.value("low") is None and read.value("high") == 3.0
