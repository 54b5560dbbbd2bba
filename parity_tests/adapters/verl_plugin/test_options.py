"""verl's own options beside a loss of ours: each acts as in verl, or is an error with the line to paste."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass

from composer_plugins.adapters.verl_plugin.options import NODE, WORKER_OVERRIDES
from composer_plugins.adapters.verl_plugin.upstream import moved
from composer_plugins.conformance.batches import Batch, Rollouts
from composer_plugins.conformance.verl_claims.policy import values_of
from composer_plugins.conformance.verl_claims.upstream import advantages, policy_loss
from composer_plugins.frameworks.contract import NamedLoss, Option
from composer_plugins.frameworks.verl import OPTIONS, TABLES, VERL, Key
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.pasted import to_paste
from parity_tests.rigs.verl_actor import composer_actor
from parity_tests.rigs.verl_source import fields, read
from parity_tests.rigs.verl_trainer import composed
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


def actor_of(overrides: Iterable[str]) -> Any:
    """The actor's config of a worker, in a run with these overrides of main_ppo's command line."""
    sizes = f"{TABLES['policy']}.use_dynamic_bsz=True"
    return omega_conf_to_dataclass(composed(sizes, *overrides).actor_rollout_ref.actor)


def pasted(overrides: Sequence[str], run: Callable[[Sequence[str]], object]) -> tuple[list[str], list[str]]:
    """The options that the error of `run` says to remove, and the overrides with its line in their place."""
    keys, line = to_paste(lambda: run(overrides))
    kept = [one for one in overrides if one.partition("=")[0] not in keys]
    return keys, [*kept, *shlex.split(line)]


LOG_RATIOS = [[0.0, 0.5, 0.3, 1.2], [0.01, -0.02, 0.3, -1.0], [1.3, 0.2, -0.1, 0.0], [-0.9, -0.2, -0.1, 0.0]]
LOG_RATIOS = torch.tensor(LOG_RATIOS).double()
LOGPROBS = torch.tensor([-1.3, -1.7, -1.5, -2.0]).double() - 0.1 * LOG_RATIOS.abs()
ADVANTAGES = torch.tensor([[1.0], [0.5], [-0.8], [-0.3]]).double().expand(4, 4).clone()
BATCH = Batch(LOGPROBS, LOGPROBS - LOG_RATIOS, ADVANTAGES, LOG_RATIOS != 1.2, None)
REWARDS = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.25, 2.0]).double()
TOKENS = torch.zeros(6, 3).double().index_put((torch.arange(6), torch.tensor([2, 1, 2, 0, 2, 2])), REWARDS)
ROLLOUTS = Rollouts(REWARDS, TOKENS, torch.arange(6) // 3, torch.ones(6, 3).bool())
VALUES = {"norm_adv_by_std_in_grpo": False, "gamma": 0.5}
OWN = [
    pytest.param(*named.options.values(), named, option, id=f"{named.row} {option.key}")
    for named in VERL.losses
    for option in VERL.options_of(named.kind)
    if VERL.runs(find_one(named.row, named.kind).loss)
    and option.values(find_one(named.row, named.kind).loss, 0)
]
FOR_OURS = (f"{Key.LOSS_MODE}=composer", *shlex.split(WORKER_OVERRIDES))


@pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")
@pytest.mark.parametrize("name, named, option", [one for one in OWN if one.values[1].kind == "policy"])
def test_a_pasted_line_trains_what_verls_own_option_does(name: str, named: NamedLoss, option: Option) -> None:
    mode, key = named.mode or "token-mean", VERL.key(option)

    def found(loss: str, overrides: Sequence[str]) -> tuple[Tensor, Tensor]:
        return policy_loss(loss, BATCH, actor_of(overrides), mode)[:2]

    usual = torch.zeros(()) if name == "dro" else found(name, [])[1]  # of dro's there is no default
    tried = [f"{key}={value}" for value in values_of(name)[option.key]]
    given, theirs = next((one, x) for one in tried if not torch.equal((x := found(name, [one]))[1], usual))
    ours = [*FOR_OURS, f"+{NODE}={{policy: {named.row}}}", given]
    keys, line = pasted(ours, lambda overrides: found("composer", overrides))
    loss, gradient = found("composer", line)
    assert keys == [key]
    assert_parity(loss, theirs[0], terms=16)
    assert_parity(gradient, theirs[1], terms=4, what="gradient")


@pytest.mark.parametrize("name, named, option", [one for one in OWN if one.values[1].kind == "advantage"])
def test_a_pasted_line_gives_the_advantages_of_verls(name: str, named: NamedLoss, option: Option) -> None:
    key, value = VERL.key(option), VALUES[option.key]

    def found(estimator: str, overrides: Sequence[str]) -> Tensor:
        config = composed(*overrides, f"{Key.GROUP_SIZE}=3").algorithm
        own = {"norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo}
        return advantages(estimator, ROLLOUTS, config=config, **own)

    given = [f"+{NODE}={{advantage: {named.row}}}", f"{key}={value}"]
    keys, line = pasted(given, lambda overrides: found("composer", overrides))
    theirs = found(name, [f"{key}={value}"])
    assert keys == [key] and not torch.equal(theirs, found(name, []))
    assert_parity(found("composer", line), theirs, terms=18, dtype=torch.float32)


def test_several_options_of_verls_own_losses_are_one_error_with_one_line() -> None:
    own = ("clip_ratio_low=0.05", "clip_ratio_high=0.1", "clip_ratio_c=1.1", "tau_pos=2.0")
    given = [f"{TABLES['policy']}.{one}" for one in own]
    keys, line = to_paste(lambda: policy_loss("composer/grpo", BATCH, actor_of(given), "token-mean"))
    assert keys == [one.partition("=")[0] for one in given]
    params = f"++{NODE}.policy_params={{clip_low: 0.05, clip_high: 0.1, dual_clip: 1.1}}"
    assert shlex.split(line) == [params, *shlex.split(WORKER_OVERRIDES)]


def test_a_loss_by_its_name_gets_parameters_from_what_is_pasted() -> None:
    """It has no other way to our options than the table, of which the error has the overrides too."""

    def trained(overrides: Sequence[str]) -> Tensor:
        return policy_loss("composer/cispo", BATCH, actor_of(overrides), "token-mean")[1]

    given = [f"{Key.LOSS_MODE}=composer/cispo", f"{TABLES['policy']}.clip_ratio_high=0.1"]
    _, line = pasted(given, trained)
    table = composer_actor({"policy": "cispo", "policy_params": {"clip_high": 0.1}})
    assert torch.equal(trained(line), policy_loss("composer", BATCH, table, "token-mean")[1])


def test_the_options_of_the_class_at_its_defaults_are_no_error() -> None:
    run = composed(f"{TABLES['policy']}.use_dynamic_bsz=True")
    assert moved("policy", actor_of([])) == {} == moved("policy", run.actor_rollout_ref.actor)
    assert moved("advantage", run.algorithm) == {} == moved("policy", {}) == moved("advantage", {})
    null = [f"{TABLES['policy']}.{one}" for one in ("clip_ratio_low=null", "clip_ratio=0.1")]
    assert moved("policy", actor_of(null)) == {"clip_ratio_low": 0.1, "clip_ratio": 0.1}

    @dataclass
    class OfARelease:
        clip_ratio_low: float = 0.3

    assert moved("policy", OfARelease()) == {} and moved("policy", {"clip_ratio_low": 0.3})
