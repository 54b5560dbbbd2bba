"""verl's own options beside a loss of ours: each acts as in verl, or an error or a warning says why not."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    get_adv_estimator_fn,
)
from verl.trainer.ppo.rollout_corr_helper import RolloutCorrectionConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from composer_plugins.adapters.verl_plugin.surface import given_options
from composer_plugins.adapters.verl_plugin.upstream import options as options_of
from composer_plugins.conformance.verl_claims import policy
from composer_plugins.conformance.verl_claims.batches import Batch, Rollouts
from composer_plugins.conformance.verl_claims.upstream import actor
from composer_plugins.conformance.verl_claims.upstream import policy_loss as verl_policy_loss
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import MODES, OPTIONS, ULYSSES
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_actor import composer_actor
from parity_tests.rigs.verl_drawn import largest_term
from parity_tests.rigs.verl_facts import assert_rows_equal, global_batches, policy_batches, rollouts
from parity_tests.rigs.verl_source import fields, read
from parity_tests.rigs.verl_wheels import folder

INSTALLED = Path(next(iter(find_spec("verl").submodule_search_locations)))  # type: ignore[union-attr, arg-type]
# Options whose default differs between verl's releases, or between its YAML, which counts, and its dataclass.
OTHERWISE = ("data_loader_seed", "rollout_correction.rollout_is")
ONES = Batch(*(-torch.ones(2, 3) for _ in range(3)), torch.ones(2, 3, dtype=torch.bool), None)
CLASSIFIED = [(option.kind, option.key) for option in OPTIONS]


def source(version: str) -> Path:
    """verl's folder in a wheel, or the installed one."""
    if version == "installed":
        return INSTALLED
    if (found := folder(version)) is None:
        pytest.skip(f"no verl {version} (nox -s verl makes it)")
    return found / "verl"


@pytest.mark.parametrize("version", ["0.6.1", "0.7.1", "0.8.0", "installed"])
def test_every_option_that_verls_losses_and_advantages_read_is_classified(version: str) -> None:
    found = read(source(version))
    assert len(found) > 20 and ("policy", "clip_ratio_high") in found and ("advantage", "gamma") in found
    assert sorted(found.difference(CLASSIFIED)) == []


def test_no_option_is_classified_that_verl_does_not_have() -> None:
    known = {one for version in ("0.6.1", "installed") for one in fields(source(version))}
    assert sorted({*CLASSIFIED} - known) == []
    assert len({*CLASSIFIED}) == len(CLASSIFIED)


@pytest.mark.parametrize("version", ["0.6.1", "0.7.1", "0.8.0", "installed"])
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
    config = OmegaConf.load(INSTALLED / "trainer/config/_generated_ppo_trainer.yaml")
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


def ours(batch: Batch, mode: str, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Value and gradient of `composer`, called as ppo_loss calls it."""
    return verl_policy_loss("composer", batch, config, mode)[:2]


DRAWN = {name: loss.options for name, loss in policy.LOSSES.items() if loss.options}
DRAWN["geo_mean"] = {"clip_ratio_low": [0.01, 0.4], "clip_ratio_high": [0.01, 0.4]}


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::composer_plugins.findings.ComposerWarning")
def test_an_option_does_with_composer_what_it_does_with_verls_own_loss(
    name: str, data: st.DataObject
) -> None:
    row = policy.ours(name)
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    if name == "geo_mean":  # the mean over rows, whatever mode and counts it is given
        info = {"global_batch_size": len(batch.mask)}
        batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    drawn = {key: data.draw(st.sampled_from(values), label=key) for key, values in DRAWN[name].items()}
    options = policy.by_name(drawn)
    theirs = verl_policy_loss(name, batch, actor(info, **options), row.mode or mode)
    found = ours(batch, mode, composer_actor({"policy": row.row}, info, **options))
    kernel = policy.our_kernel(row.row, drawn)
    largest = largest_term(kernel, batch, row.mode or mode, info)
    assert_parity(found[0], theirs[0], terms=batch.mask.numel(), magnitude=largest)
    assert_parity(found[1], theirs[1], terms=batch.mask.numel())


def test_daos_clip_higher_moves_over_and_is_not_trained_at_0_2() -> None:
    """The issue's case: the ratio is 1.25, between the two bounds."""
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Batch(-one, -one - torch.log(1.25 * one), one, one.bool(), None)
    gradients = [
        float(ours(batch, "token-mean", composer_actor({"policy": "grpo@verl"}, **given))[1])
        for given in ({}, {"clip_ratio_high": 0.28}, {"clip_ratio_low": None, "clip_ratio_high": None})
    ]
    assert gradients == [0.0, pytest.approx(-1.25), 0.0]


@pytest.mark.filterwarnings("ignore::composer_plugins.findings.ComposerWarning")
def test_verls_correction_in_the_workers_config_is_an_error_beside_ours() -> None:
    config = composer_actor({}, rollout_correction=RolloutCorrectionConfig(rollout_is="token"))
    with pytest.raises(ConfigError, match="set algorithm.rollout_correction.rollout_is") as error:
        ours(ONES, "token-mean", config)
    assert error.value.key == "actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is"


def test_the_same_value_twice_and_a_value_at_verls_default_are_accepted() -> None:
    both = composer_actor({"policy": "grpo@verl", "policy_params": {"clip_high": 0.28}}, clip_ratio_high=0.28)
    own = composer_actor({"policy": "grpo@verl", "policy_params": {"clip_high": 0.3}}, clip_ratio_high=0.2)
    for config in (both, own):
        assert ours(ONES, "token-mean", config)[0].isfinite()


def test_dro_beta_is_enough_for_dro_in_the_driver_and_in_a_worker() -> None:
    node = {"policy": "dro"}
    mask = torch.ones(2, 3, dtype=torch.long)
    algorithm = OmegaConf.create({"composer": node})
    call = {"token_level_rewards": mask.float(), "response_mask": mask, "index": ["a", "a"]}
    get_adv_estimator_fn("composer")(config=algorithm, **call)
    assert ours(ONES, "token-mean", composer_actor(node, dro_beta=0.1))[0].isfinite()
    with pytest.raises(
        ConfigError, match=re.escape("algorithm.composer.policy_params.beta: 'dro' has no def")
    ):
        ours(ONES, "token-mean", composer_actor(node))


def estimated(given: Rollouts, config: dict[str, Any], **node: Any) -> Tensor:
    """Our advantages with these options under `algorithm`."""
    call = {"token_level_rewards": given.token_rewards, "response_mask": given.mask.long()}
    index = [f"prompt {i}" for i in given.ids.tolist()]
    algorithm = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True, **config, "composer": node})
    advantages: Tensor = get_adv_estimator_fn("composer")(index=index, config=algorithm, **call)[0]
    return advantages


@settings(max_examples=40, deadline=None)
@given(batch=rollouts(min_group=2))
def test_norm_adv_by_std_in_grpo_leaves_out_the_standard_deviation_as_in_verl(batch: Rollouts) -> None:
    batch = batch._replace(mask=torch.ones_like(batch.mask))
    index, mask = batch.ids.numpy(), batch.mask.long()
    without = {"norm_adv_by_std_in_grpo": False}
    theirs = compute_grpo_outcome_advantage(batch.token_rewards, mask, index, norm_adv_by_std_in_grpo=False)[
        0
    ]
    for name in ("grpo@verl", "grpo", "dr_grpo@verl"):
        assert_rows_equal(estimated(batch, without, advantage=name)[:, 0], theirs, batch, eps=1e-6)
    best = compute_grpo_passk_outcome_advantage(batch.token_rewards, mask, index, config=without)[0]
    found = estimated(batch, without, advantage="pass_at_k@verl")
    assert_rows_equal(found[:, 0], best, batch, eps=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99])
def test_gamma_discounts_reinforce_pp_as_in_verl(gamma: float) -> None:
    tokens = torch.zeros(4, 3, dtype=torch.float64)
    tokens[:, -1] = torch.tensor([0.5, -1.0, 2.0, 0.0])
    mask = torch.ones(4, 3, dtype=torch.bool)
    config: Any = OmegaConf.create({"gamma": gamma})
    theirs = compute_reinforce_plus_plus_outcome_advantage(tokens, mask.long(), config=config)[0]
    batch = Rollouts(tokens.sum(-1), tokens, torch.zeros(4, dtype=torch.long), mask)
    found = estimated(batch, {"gamma": gamma}, advantage="reinforce_pp@verl")
    # verl whitens in float32, because its mask has whole numbers
    assert_parity(found, theirs, terms=12, magnitude=float(theirs.abs().max()), dtype=torch.float32)
