"""verl's own options beside a loss of ours: each acts as in verl, or an error or a warning says why not."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import verl
import yaml
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.rollout_corr_helper import RolloutCorrectionConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from composer_plugins.adapters.verl_plugin.migration import READ
from composer_plugins.adapters.verl_plugin.surface import given_options
from composer_plugins.adapters.verl_plugin.upstream import options as options_of
from composer_plugins.conformance.verl_claims.upstream import actor, policy_loss
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import OPTIONS, TABLES, ULYSSES, VERL
from parity_tests.rigs.verl_actor import ONES, algorithm, composer_actor
from parity_tests.rigs.verl_source import fields, read
from parity_tests.rigs.verl_wheels import INSTALLED, wheel

SITE = Path(verl.__file__).parents[1]
VERSIONS = ("0.8.0", INSTALLED)
# Options whose default differs between verl's releases, or between its YAML, which counts, and its dataclass.
OTHERWISE = ("data_loader_seed", "rollout_correction.rollout_is")
CLASSIFIED = [(option.kind, option.key) for option in OPTIONS]


def source(version: str) -> Path:
    """The source of a version of verl."""
    return (wheel(version) or SITE) / "verl"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_that_verls_losses_and_advantages_read_is_classified(version: str) -> None:
    found = read(source(version))
    assert len(found) > 20 and ("policy", "clip_ratio_high") in found and ("advantage", "gamma") in found
    assert sorted(found.difference(CLASSIFIED)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_that_verls_trainers_and_workers_read_is_in_a_table(version: str) -> None:
    """`migrate` says that nothing differs only where it knows each of these keys."""
    found = {f"{TABLES[kind]}.{key}" for kind, key in read(source(version), anywhere=True)}
    assert len(found) > 60 and found > {f"{TABLES[kind]}.{key}" for kind, key in read(source(version))}
    found |= {key for key in keys(version) if key.startswith("critic.")}
    known = READ | VERL.not_carried.keys() | VERL.no_bearing
    covered = {key for key in found for one in known if f"{key}.".startswith(f"{one}.")}
    tables = {key for key in found for one in known if one.startswith(f"{key}.")}
    assert sorted(found - covered - tables) == []


def keys(version: str) -> set[str]:
    """Every key of a version's configs of PPO, but those of profilers."""
    files = (source(version) / "trainer/config").glob("_generated_ppo*_trainer.yaml")
    found = {one for file in files for one in options_of(yaml.safe_load(file.read_text().replace("{}", "0")))}
    return {one for one in found if not re.search("profile|tool_config|nsight", one)}


def test_no_option_is_classified_that_verl_does_not_have() -> None:
    known = {one for version in VERSIONS for one in fields(source(version))}
    assert sorted({*CLASSIFIED} - known) == []
    assert len({*CLASSIFIED}) == len(CLASSIFIED)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_are_verls(version: str) -> None:
    known = fields(source(version))
    for option in OPTIONS:
        default = known.get((option.kind, option.key), ...)  # of a table, verl makes a new one each time
        if default is not ... and option.key not in OTHERWISE:
            assert default == option.default, option.key


@pytest.mark.parametrize("model", ["actor", "ref"])
def test_the_options_that_cut_sequences_for_several_ranks_are_those_that_verls_engine_gets(
    model: str,
) -> None:
    config = OmegaConf.load(SITE / "verl/trainer/config/_generated_ppo_trainer.yaml")
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    found = []
    for key in options_of(OmegaConf.to_container(config.actor_rollout_ref[model])):
        changed = config.copy()
        table = changed.actor_rollout_ref[model]
        if isinstance(OmegaConf.select(table, key), int):
            OmegaConf.update(table, key, 2)
            for name in [name for name in table if name.startswith("log_prob_")]:  # as verl's worker does
                table.pop(name)
            table.use_dynamic_bsz = True
            with suppress(Exception):  # a value that verl refuses
                size = omega_conf_to_dataclass(table).engine.ulysses_sequence_parallel_size
                found += [key] * (size != 1)
    assert sorted(found) == sorted(ULYSSES)


def test_a_config_of_verls_defaults_gives_no_option() -> None:
    assert given_options("policy", actor()) == {} == given_options("advantage", OmegaConf.create({}))
    set_to_null = actor(clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio=0.1)
    assert given_options("policy", set_to_null) == {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}


def loss_of(config: ActorConfig) -> Tensor:
    """The value of `composer`, called as ppo_loss calls it."""
    return policy_loss("composer", ONES, config, "token-mean")[0]


@pytest.mark.filterwarnings("ignore::composer_plugins.findings.ComposerWarning")
def test_verls_correction_in_the_workers_config_is_an_error_beside_ours() -> None:
    config = composer_actor({}, rollout_correction=RolloutCorrectionConfig(rollout_is="token"))
    with pytest.raises(ConfigError, match="set algorithm.rollout_correction.rollout_is") as error:
        loss_of(config)
    assert error.value.key == "actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is"


def test_dro_beta_is_enough_for_dro_in_the_driver_and_in_a_worker() -> None:
    node = {"policy": "dro"}
    mask = torch.ones(2, 3, dtype=torch.long)
    call = {"token_level_rewards": mask.float(), "response_mask": mask, "index": ["a", "a"]}
    get_adv_estimator_fn("composer")(config=algorithm(**node), **call)
    assert loss_of(composer_actor(node, dro_beta=0.1)).isfinite()
    with pytest.raises(
        ConfigError, match=re.escape("algorithm.composer.policy_params.beta: 'dro' has no def")
    ):
        loss_of(composer_actor(node))
