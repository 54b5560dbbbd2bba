"""`composer-plugins migrate`: the gradients of both sides, through the real loss paths of verl and TRL."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
from composer_plugins.testing.assertions import tolerance
from docs.generator import printed, written
from parity_tests.rigs.verl_wheels import FOLDERS

TERMS = 6 * 7  # rows and tokens of a drawn batch
COLUMNS = 6


@pytest.fixture(scope="module")
def migrated() -> dict[str, Any]:
    """The rows and the table of the program, from a process that has both frameworks."""
    if not written.wheel_of_trl().is_dir():
        pytest.skip(f"no TRL in a folder that {FOLDERS} names (nox -s verl makes it)")
    found: dict[str, Any] = json.loads(printed.migrated("--json").splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_migrated_config_has_the_gradient_of_its_source_up_to_what_is_listed(
    migrated: dict[str, Any],
) -> None:
    rows: list[dict[str, Any]] = migrated["rows"]
    for row in rows:
        assert row["gradient"] is None or row["gradient"] <= tolerance(torch.float64, TERMS, 1.0), row
        assert row["gradient"] is not None or any(one.startswith("KL") for one in row["differences"]), row
    of_catalogue = {row["case"] for row in rows if "'s " not in row["case"]}
    assert len(of_catalogue) >= 12
    for case in of_catalogue:
        assert sum(row["case"] == case for row in rows) == COLUMNS, case
    itself = [row for row in rows if row["source"] == row["target"]]
    assert itself and all(row["differences"] == [] for row in itself), "a loss of the framework's own"


@pytest.mark.slow
def test_the_page_shows_what_the_program_prints(migrated: dict[str, Any]) -> None:
    written.part("docs/migrate.md", "same gradient").check(migrated["table"])


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
