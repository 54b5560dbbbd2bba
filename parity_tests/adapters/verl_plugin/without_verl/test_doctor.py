"""`composer-plugins doctor --verl`: the findings in what the probe answered. verl itself is not needed."""

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from composer_plugins.adapters.verl_plugin import doctor as verl_doctor
from composer_plugins.adapters.verl_plugin.doctor.options import (
    TARGET,
    Run,
    absent_files,
    file_columns,
    findings,
)
from composer_plugins.adapters.verl_plugin.surface import TRAINER
from composer_plugins.adapters.verl_plugin.upstream import PLUGIN, release_of
from composer_plugins.cli.doctor import doctor
from composer_plugins.diagnosis import Target
from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from parity_tests.rigs.paths import ROOT

APP = typer.Typer()
APP.command()(doctor)

MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
ACTOR, NODE = "actor_rollout_ref.actor", "algorithm.composer"
LOSS, MODE = f"{ACTOR}.policy_loss", "trainer.v1.trainer_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout.calculate_log_probs"
DISTILLATION, DISTILLED = "distillation.enabled", "distillation.distillation_loss"
FUSED = "actor_rollout_ref.model.use_fused_kernels"

DEFAULTS: dict[str, Any] = {  # verl 0.9.1's, as far as they are looked at
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    BYPASS: False,
    f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig",
    f"{LOSS}.loss_mode": "vanilla",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.shuffle": False,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.model.external_lib": None,
    FUSED: False,
    ROLLOUT: True,
    "trainer.project_name": "verl_examples",
    "trainer.use_v1": True,
    MODE: "sync",
    "data.train_files": "train.parquet",
    "data.custom_cls.path": None,
    DISTILLATION: False,
    f"{DISTILLED}.use_task_rewards": True,
    f"{DISTILLED}.use_policy_gradient": False,
    f"{DISTILLED}.policy_loss_mode": "vanilla",
    "ray_kwargs.ray_init.runtime_env.py_executable": None,
}
OURS = {"algorithm.adv_estimator": "composer"}
WORKERS = {f"{LOSS}.loss_mode": "composer", f"{LOSS}._target_": TARGET}
SYNC = {**OURS, MODE: TRAINER}
FROZEN = {f"{ACTOR}.use_kl_loss": True}
HINT = {**SYNC, **FROZEN, f"{NODE}.hint_weight": 0.1, f"{NODE}.hint_top_k": 20}
SAMPLED = {**SYNC, **FROZEN, f"{NODE}.hint_weight": 0.1, f"{NODE}.hint_divergence": "sampled_token"}
REPLAY = {**SYNC, **FROZEN, f"{NODE}.replay_weight": 1}
PARQUET = {"train.parquet": ["prompt", "privileged_context", "chosen", "rejected"]}

NAMES = {
    "estimators": ["composer", "composer/reinforce_pp_baseline", "composer/rloo", "gae", "grpo", "rloo"],
    "losses": [
        "composer",
        *(f"composer/{name}" for name in ("cispo", "dapo", "dppo_tv", "grpo", "reinforce")),
        "geo_mean",
        "vanilla",
    ],
    "trainers": ["colocate_async", TRAINER, "separate_async", "sync"],
}
VERL = {"version": "0.9.1", "error": "", "absent": False, "modules": {}, "failure": ""}
QUEUE = {"present": True, "version": "0.1.11", "wanted": "TransferQueue>=0.1.10", "fits": True}
FACTS: dict[str, Any] = {
    "package": "",
    "entry_points": {"composer": PLUGIN},
    "environment": {},
    "verl": VERL,
    "trl": None,
    "transfer_queue": QUEUE,
    "composition": [],
    "library": "",
    **NAMES,
}
UNREGISTERED = {"estimators": ["gae", "grpo"], "losses": ["vanilla"], "trainers": ["sync"]}


def tree(changes: Mapping[str, Any]) -> dict[str, Any]:
    """verl's config with these changes, by their dotted keys."""
    made: dict[str, Any] = {}
    for path, value in {**DEFAULTS, **changes}.items():
        *above, last = path.split(".")
        holder = made
        for key in above:
            holder = holder.setdefault(key, {})
        holder[last] = deepcopy(value)
    return made


def sent(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the node interpolated into the workers' policy_loss."""
    config["actor_rollout_ref"]["actor"]["policy_loss"]["composer"] = config["algorithm"]["composer"]
    return config


def answered(config: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """What a probe answers, of an environment in which all is well."""
    columns = others.pop("columns", PARQUET)
    facts = {**FACTS, "config": config, **others}
    run = Run(config or {}, release_of(facts["verl"]["version"]))
    return facts | {"findings": findings(run, facts, columns) if config else []}


def judged(config: dict[str, Any] | None, version: str | None = None, **others: Any) -> list[Finding]:
    verl = VERL | {"version": version} if version else VERL
    facts = answered(config, **{"verl": verl, **others})
    release = release_of(version or facts["verl"]["version"])
    return list(verl_doctor.judge(facts, Target("python", version), release))


SOUND: dict[str, dict[str, Any]] = {
    "an estimator": OURS,
    "a named estimator": {"algorithm.adv_estimator": "composer/rloo"},
    "its parameters": {**OURS, f"{NODE}.advantage": "rloo"},
    "a policy loss": {f"{LOSS}.loss_mode": "composer/cispo", "algorithm.adv_estimator": "grpo"},
    "the same twice": {f"{LOSS}.loss_mode": "composer/cispo", **OURS, f"{NODE}.policy": "cispo"},
    "verl's clips": {
        **OURS,
        f"{LOSS}.loss_mode": "composer/dapo",
        f"{ACTOR}.clip_ratio_high": 0.3,
        f"{ACTOR}.clip_ratio_c": 10.0,
    },
    "verl's beta of dro": {
        **OURS,
        **WORKERS,
        f"{NODE}.policy": "dro",
        f"{LOSS}.composer": {"policy": "dro"},
        f"{LOSS}.dro_beta": 0.1,
    },
    "no standard deviation": {**OURS, "algorithm.norm_adv_by_std_in_grpo": False},
    "no standard deviation, twice": {
        "algorithm.adv_estimator": "composer/rloo",
        "algorithm.norm_adv_by_std_in_grpo": False,
    },
    "verl's correction": {**OURS, f"{CORRECTION}.rollout_is": "token"},
    "the legacy trainer": {**OURS, "trainer.use_v1": False},
    "a hint": HINT,
    "a hint of sampled tokens": SAMPLED,
    "a hint of sampled tokens with fused kernels": {**SAMPLED, FUSED: True},
    "a live hint": {**HINT, f"{ACTOR}.use_kl_loss": False, f"{NODE}.hint_teacher": "live"},
    "a reference by the reward": {**HINT, f"{ACTOR}.use_kl_loss": False, "algorithm.use_kl_in_reward": True},
    "replay": REPLAY,
    "replay without a reference": {
        **REPLAY,
        f"{ACTOR}.use_kl_loss": False,
        f"{NODE}.replay_loss": "simpo",
    },
    "a trainer of ours with nothing on": SYNC,
    "weights of 0": {**OURS, f"{NODE}.hint_weight": 0, f"{NODE}.replay_weight": 0.0},
    "DPPO around the engine's policy": {f"{LOSS}.loss_mode": "composer/dppo_tv", BYPASS: True},
    "verl's own reduction of geo_mean": {
        **OURS,
        **WORKERS,
        f"{NODE}.policy": "gmpo@verl",
        f"{LOSS}.composer": {"policy": "gmpo@verl"},
    },
    "one rollout and an advantage without groups": {
        **OURS,
        f"{NODE}.advantage": "reinforce_pp",
        "actor_rollout_ref.rollout.n": 1,
    },
    "options of the KL, the correction and the reduction that act": {
        **OURS,
        **FROZEN,
        f"{ACTOR}.kl_loss_coef": 0.01,
        f"{ACTOR}.kl_loss_type": "mse",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "low_var_kl",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 100,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": 5.0,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 1024,
    },
    "the advantage of the paper, as verl has it": {
        **WORKERS,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{LOSS}.composer": {"policy": "dr_grpo"},
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "options of what is off, set to nothing": {**OURS, f"{ACTOR}.kl_loss_coef": 0},
    "verl's distillation beside the task's rewards": {**OURS, DISTILLATION: True},
    "options of a distillation that is off": {
        **OURS,
        f"{DISTILLED}.use_task_rewards": False,
        f"{DISTILLED}.policy_loss_mode": "composer",
    },
    "sequence parallelism beside a hint of sampled tokens": {
        **SAMPLED,
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2,
    },
    "a loss of sequences beside equal advantages": {
        **OURS,
        **WORKERS,
        f"{NODE}.advantage": "reinforce_pp",
        f"{NODE}.policy": "gspo",
        f"{LOSS}.composer": {"policy": "gspo", "advantage": "reinforce_pp"},
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_config_has_no_finding(name: str) -> None:
    assert judged(tree(SOUND[name])) == []


def test_a_policy_with_parameters_that_the_workers_see_has_no_finding() -> None:
    policy = {f"{NODE}.policy": "cispo", f"{NODE}.policy_params": {"clip_high": 4.0}}
    assert judged(sent(tree({**OURS, **WORKERS, **policy}))) == []
    hint_alone = {**policy, f"{NODE}.policy_weight": 0.0, "actor_rollout_ref.rollout.n": 1}
    assert judged(sent(tree({**HINT, **WORKERS, **hint_alone}))) == []  # no advantage is used
    by_path = {f"{NODE}.policy": f"{__name__}:of_rollouts", f"{NODE}.policy_params": {"sharpness": 2}}
    assert judged(sent(tree({**OURS, **WORKERS, **by_path, BYPASS: True}))) == []
    assert judged(sent(tree({**HINT, **WORKERS, **policy, f"{NODE}.policy_weight": 0.5}))) == []


def test_an_environment_alone_is_judged_without_a_config() -> None:
    assert judged(None) == []
    keys = [one.key for one in judged(None, transfer_queue=QUEUE | {"present": False})]
    assert keys == ["transfer_queue"]


AGG = f"{ACTOR}.loss_agg_mode"
PAPERS = {AGG: "seq-mean-token-mean"}  # GRPO's
GROUP_SIZE = "actor_rollout_ref.rollout.n"
COMPOSER = {f"{LOSS}.loss_mode": "composer", **PAPERS}
TOP = HINT  # compares distributions
NOT_FOR = "or set hint_divergence='sampled_token'"

# What is changed in the config, the key (after its severity, if that is not "error"), words of the finding.
TRAPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown estimator": (
        {"algorithm.adv_estimator": "composer/rlo"},
        "algorithm.adv_estimator",
        "unknown advantage estimator 'composer/rlo' did you mean 'composer/rloo'",
    ),
    "an unknown loss": (
        {f"{LOSS}.loss_mode": "composer/cipso"},
        f"{LOSS}.loss_mode",
        "unknown policy loss 'composer/cipso' did you mean 'composer/cispo'",
    ),
    "an unknown loss of verl's": (
        {**OURS, f"{LOSS}.loss_mode": "vanila"},
        f"{LOSS}.loss_mode",
        "'vanila' did you mean 'vanilla'",
    ),
    "an unknown trainer": ({**OURS, MODE: "snc"}, MODE, "unknown trainer 'snc' did you mean 'sync'"),
    "an unknown trainer beside a hint": (
        {**HINT, MODE: "composr_sync"},
        MODE,
        "unknown trainer 'composr_sync' did you mean 'composer_sync'",
    ),
    "one rollout of each prompt": (
        {**OURS, GROUP_SIZE: 1},
        f"warning {GROUP_SIZE}",
        "it is 1 'grpo' compares every advantage is 0 set 2 or more reinforce_pp",
    ),
    "one rollout of each prompt, as in verl": (
        {**OURS, f"{NODE}.advantage": "grpo@verl", GROUP_SIZE: 1},
        f"warning {GROUP_SIZE}",
        "it is 1 'grpo@verl' its own reward alone, without a baseline set 2 or more",
    ),
    "a reduction that gmpo@verl does not have": (
        {
            **OURS,
            **WORKERS,
            f"{NODE}.policy": "gmpo@verl",
            f"{LOSS}.composer": {"policy": "gmpo@verl"},
            AGG: "token-sum",
        },
        f"warning {AGG}",
        "it is 'token-sum' 'gmpo@verl' is always reduced by 'seq-mean-token-mean', as in verl",
    ),
    "a KL coefficient without the KL": (
        {**SYNC, f"{ACTOR}.kl_loss_coef": 0.01},
        f"warning {ACTOR}.kl_loss_coef",
        f"it is 0.01 no effect, because {ACTOR}.use_kl_loss is False set {ACTOR}.use_kl_loss=True, or remove",
    ),
    "a KL estimator without the KL in the reward": (
        {**SYNC, "algorithm.kl_penalty": "low_var_kl"},
        "warning algorithm.kl_penalty",
        "no effect, because algorithm.use_kl_in_reward is False set algorithm.use_kl_in_reward=True",
    ),
    "a threshold without its correction": (
        {**SYNC, f"{CORRECTION}.rollout_is_threshold": 5.0},
        f"warning {CORRECTION}.rollout_is_threshold",
        f"it is 5.0 because {CORRECTION}.rollout_is is not set set {CORRECTION}.rollout_is, or remove it",
    ),
    "a length that the reduction does not read": (
        {**SYNC, f"{ACTOR}.loss_scale_factor": 1024},
        f"warning {ACTOR}.loss_scale_factor",
        f"it is 1024 because {AGG} is 'token-mean' set {AGG}=seq-mean-token-sum-norm, or remove it",
    ),
    "a loss of sequences beside advantages of tokens": (
        {
            MODE: TRAINER,
            "algorithm.adv_estimator": "gae",
            **WORKERS,
            f"{LOSS}.composer": {"policy": "gspo"},
            **PAPERS,
        },
        f"{LOSS}.loss_mode",
        "'gspo' takes one advantage per response 'gae' for each token choose another gspo_token",
    ),
    "a hint in the advantages that verl's own loss averages": (
        {**SAMPLED, f"{NODE}.hint_estimator": "advantage", f"{LOSS}.loss_mode": "geo_mean"},
        f"{NODE}.hint_estimator",
        "'advantage' gives each token its own 'geo_mean' averages set 'score' gspo_token",
    ),
    "an advantage that only the workers see": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"advantage": "rloo", "policy": "cispo"}},
        f"{LOSS}.composer.advantage",
        f"it is 'rloo' no effect read from {NODE} set {NODE}.advantage, and {LOSS}.composer='${{{NODE}}}'",
    ),
    "a hint that only the workers see": (
        {**SYNC, **WORKERS, f"{LOSS}.composer": {"policy": "cispo", "hint_weight": 0.5}},
        f"{LOSS}.composer.hint_weight",
        f"it is 0.5 set {NODE}.hint_weight",
    ),
    "a policy in the workers beside verl's loss": (
        {**OURS, f"{LOSS}._target_": TARGET, f"{LOSS}.composer": {"policy": "cispo"}},
        f"{LOSS}.composer.policy",
        "it is 'cispo' no effect here",
    ),
    "a dialect in a registered name": (
        {"algorithm.adv_estimator": "composer/grpo@verl"},
        "algorithm.adv_estimator",
        f"'composer/grpo@verl' dialect set algorithm.adv_estimator=composer, and {NODE}.advantage=grpo@verl",
    ),
    "an import path in place of a registered name": (
        {**OURS, f"{LOSS}.loss_mode": "my.losses:mine"},
        f"{LOSS}.loss_mode",
        f"'my.losses:mine' import path set {LOSS}.loss_mode=composer, and {NODE}.policy=my.losses:mine",
    ),
    "a length that is not above 0": (
        {**SYNC, AGG: "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": -1},
        f"{ACTOR}.loss_scale_factor",
        "it is -1 set a number above 0, or null",
    ),
    "our trainer in the legacy trainer": (
        {**SYNC, "trainer.use_v1": False},
        f"warning {MODE}",
        "it is 'composer_sync' legacy trainer runs trainer.use_v1=True",
    ),
    "an unknown option": (
        {**OURS, f"{NODE}.hint_wieght": 0.1},
        f"{NODE}.hint_wieght",
        "unknown option 'hint_wieght' did you mean 'hint_weight'",
    ),
    "an option of the wrong type": (
        {**OURS, f"{NODE}.hint_weight": "0.1"},
        f"{NODE}.hint_weight",
        "it is '0.1' set a valid number",
    ),
    "an unknown advantage": (
        {**OURS, f"{NODE}.advantage": "grop"},
        f"{NODE}.advantage",
        "unknown advantage 'grop' did you mean 'grpo'",
    ),
    "an advantage whose baselines verl does not compute": (
        {**OURS, f"{NODE}.advantage": "remax@verl"},
        f"{NODE}.advantage",
        "needs baselines verl samples only algorithm.adv_estimator=remax trainer.use_v1=False",
    ),
    "a critic": ({**OURS, "critic.enable": True}, "critic.enable", "no returns critic.enable=False"),
    "two advantages": (
        {"algorithm.adv_estimator": "composer/rloo", f"{NODE}.advantage": "grpo"},
        f"{NODE}.advantage",
        "'grpo' contradicts the name composer/rloo remove it",
    ),
    "verl's clip beside a loss without one": (
        {**OURS, f"{LOSS}.loss_mode": "composer/reinforce", f"{ACTOR}.clip_ratio_high": 0.28},
        f"{ACTOR}.clip_ratio_high",
        "it is 0.28 no effect on the policy 'reinforce' leave it at verl's default, 0.2",
    ),
    "verl's clip and another one in the node": (
        {
            **OURS,
            **WORKERS,
            f"{LOSS}.composer": {"policy": "grpo@verl", "policy_params": {"clip_high": 0.3}},
            f"{ACTOR}.clip_ratio_high": 0.28,
        },
        f"{ACTOR}.clip_ratio_high",
        f"sets clip_high to 0.28 {NODE}.policy_params.clip_high is 0.3 set one of them",
    ),
    "a clip of 28 for 28 percent": (
        {**OURS, **PAPERS, f"{LOSS}.loss_mode": "composer/grpo", f"{ACTOR}.clip_ratio_high": 28.0},
        f"warning {ACTOR}.clip_ratio_high",
        "clip_high=28 clips the ratio only above 29 set 0.28 if it is a percentage",
    ),
    "verl's clip of PPO beside a ratio of the sequence": (
        {
            **OURS,
            **WORKERS,
            **PAPERS,
            f"{NODE}.policy": "gspo",
            f"{LOSS}.composer": {"policy": "gspo"},
            f"{ACTOR}.clip_ratio_high": 0.28,
        },
        f"warning {ACTOR}.clip_ratio_high",
        "clip_high=0.28 bounds the ratio of a sequence hardly any sequence is clipped GSPO (3e-4 and 4e-4)",
    ),
    "verl's name of a parameter": (
        {
            **OURS,
            **WORKERS,
            **PAPERS,
            f"{NODE}.policy_params": {"clip_ratio_c": 3.0},
            f"{LOSS}.composer": {"policy_params": {"clip_ratio_c": 3.0}},
        },
        f"{NODE}.policy_params.clip_ratio_c",
        "unknown grpo parameter 'clip_ratio_c' set dual_clip, its name here",
    ),
    "a parameter among the options": (
        {
            **OURS,
            **WORKERS,
            **PAPERS,
            f"{NODE}.clip_ratio_high": 0.28,
            f"{LOSS}.composer": {"clip_ratio_high": 0.28},
        },
        f"{NODE}.clip_ratio_high",
        "it is a parameter of policy 'grpo' set clip_high in policy_params, its name here",
    ),
    "verl's clip out of the range": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", f"{ACTOR}.clip_ratio_low": -0.5},
        f"{ACTOR}.clip_ratio_low",
        "it is -0.5 set a finite number in [0, inf)",
    ),
    "a clip that verl does not read": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", f"{ACTOR}.clip_ratio": 0.1},
        f"warning {ACTOR}.clip_ratio",
        "it is 0.1 verl reads it only where set clip_ratio_low and clip_ratio_high",
    ),
    "an unknown reduction": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", AGG: "token_mean"},
        AGG,
        "unknown mode 'token_mean' did you mean 'token-mean'?",
    ),
    "an unknown reduction of verl's own loss": (
        {**OURS, AGG: "seq-mean"},
        AGG,
        "unknown mode 'seq-mean' did you mean 'seq-mean-token-",
    ),
    "an option of another loss of verl's": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", f"{LOSS}.kl_cov_ratio": 0.1},
        f"{LOSS}.kl_cov_ratio",
        f"no effect {LOSS}.loss_mode=kl_cov, verl's own loss",
    ),
    "a discount beside an advantage without one": (
        {**OURS, "algorithm.gamma": 0.99},
        "algorithm.gamma",
        "it is 0.99 no effect on the advantage 'grpo' leave it at verl's default, 1.0",
    ),
    "no deviation beside an advantage that divides by one": (
        {
            "algorithm.adv_estimator": "composer/reinforce_pp_baseline",
            "algorithm.norm_adv_by_std_in_grpo": False,
        },
        "algorithm.norm_adv_by_std_in_grpo",
        "it is False no effect on the advantage 'reinforce_pp_baseline'",
    ),
    "verl's name of a loss of ours": (
        {f"{LOSS}.loss_mode": "composer/vanilla"},
        f"{LOSS}.loss_mode",
        f"'vanilla' verl's own name set {LOSS}.loss_mode=composer {NODE}.policy=grpo@verl its name here",
    ),
    "verl's name of an advantage of ours": (
        {"algorithm.adv_estimator": "composer/grpo_passk"},
        "algorithm.adv_estimator",
        f"'grpo_passk' verl's own name {NODE}.advantage=pass_at_k@verl",
    ),
    "verl's name of a loss as an option": (
        {**OURS, f"{NODE}.policy": "geo_mean"},
        f"{NODE}.policy",
        "'geo_mean' is verl's own name set gmpo@verl",
    ),
    "a deviation of the batch under verl's name of a flag": (
        {**OURS, "algorithm.norm_adv_by_std_in_grpo": "batch"},
        "algorithm.norm_adv_by_std_in_grpo",
        "it is 'batch' set True or False",
    ),
    "a rollout correction without log-probabilities": (
        {**OURS, f"{CORRECTION}.rollout_is": "token", ROLLOUT: False},
        f"{CORRECTION}.rollout_is",
        f"it is 'token' no effect {ROLLOUT} is False set {ROLLOUT}=True",
    ),
    "a rollout correction with bypass_mode": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", BYPASS: True, f"{CORRECTION}.rollout_rs": "token_k1"},
        f"{CORRECTION}.rollout_rs",
        f"it is 'token_k1' only verl's own loss 'bypass_mode' reads it {BYPASS}=False",
    ),
    "a loss type of bypass_mode": (
        {**OURS, f"{LOSS}.loss_mode": "composer/dapo", f"{CORRECTION}.loss_type": "reinforce"},
        f"{CORRECTION}.loss_type",
        "it is 'reinforce' only verl's own loss remove it",
    ),
    "what verl does itself": (
        {**OURS, f"{NODE}.rollout_correction": "tis"},
        f"{NODE}.rollout_correction",
        "rollout_correction remove it",
    ),
    "no table": ({**OURS, NODE: 3}, NODE, "3 write a table of options"),
    "options that nothing reads": (
        {"algorithm.adv_estimator": "grpo", f"{NODE}.advantage": "rloo"},
        NODE,
        "nothing reads it: adv_estimator is 'grpo' loss_mode 'vanilla' algorithm.adv_estimator=composer",
    ),
    "nothing of ours": (
        {"algorithm.adv_estimator": "grpo"},
        "warning algorithm.adv_estimator",
        "verl trains with its own set algorithm.adv_estimator=composer",
    ),
    "an advantage beside another estimator": (
        {"algorithm.adv_estimator": "grpo", **COMPOSER, f"{NODE}.advantage": "rloo"},
        f"{NODE}.advantage",
        "no effect, because algorithm.adv_estimator is 'grpo'",
    ),
    "a policy beside verl's loss": (
        {**OURS, f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        f"no effect, because {LOSS}.loss_mode is 'vanilla' {LOSS}.loss_mode=composer '${{{NODE}}}'",
    ),
    "the policy's weight beside verl's loss": (
        {**REPLAY, f"{NODE}.policy_weight": 0.0},
        f"{NODE}.policy_weight",
        f"no effect, because {LOSS}.loss_mode is 'vanilla'",
    ),
    "parameters that the workers do not see": (
        {**OURS, **COMPOSER, f"{NODE}.policy_params": {"clip_high": 0.3}},
        f"{NODE}.policy_params",
        f"workers have {{}} {LOSS}._target_={TARGET} +{LOSS}.composer='${{{NODE}}}'",
    ),
    "a policy that the workers do not see": (
        {**OURS, **COMPOSER, f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        "it is 'cispo' workers have 'grpo'",
    ),
    "a policy's weight that the workers do not see": (
        {**SAMPLED, f"{LOSS}.loss_mode": "composer/cispo", f"{NODE}.policy_weight": 0.5},
        f"{NODE}.policy_weight",
        "it is 0.5 'composer/cispo' 1.0",
    ),
    "a target without the node": (
        {**OURS, **WORKERS, **PAPERS, f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        "workers have 'grpo'",
    ),
    "another policy in the workers": (
        {**SAMPLED, **WORKERS, **PAPERS, f"{NODE}.policy": "cispo", f"{LOSS}.composer": {"policy": "grpo"}},
        f"{NODE}.policy",
        "it is 'cispo' have 'grpo'",
    ),
    "a node without its target": (
        {**OURS, f"{LOSS}.loss_mode": "composer", f"{LOSS}.composer": {"policy": "cispo"}},
        f"{LOSS}._target_",
        f"verl.workers.config.PolicyLossConfig does not take TypeError set it to {TARGET}",
    ),
    "an unknown policy in the workers' node": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"policy": "cipso"}},
        f"{LOSS}.composer.policy",
        "unknown policy loss 'cipso' did you mean 'cispo'",
    ),
    "a loss over the whole batch": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"policy": "clip_cov"}},
        f"{LOSS}.composer.policy",
        "statistic of the whole batch verl cuts",
    ),
    "an input that verl does not have": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"policy": f"{__name__}:of_entropies"}},
        f"{LOSS}.composer.policy",
        "needs entropies, which verl does not provide (inputs here: advantages, logprobs, mask, old_logprobs",
    ),
    "a reduction that is not the paper's": (
        {f"{LOSS}.loss_mode": "composer/grpo"},
        f"warning {AGG}",
        "it is 'token-mean' 'grpo' is reduced by 'seq-mean-token-mean' grpo@verl",
    ),
    "an advantage that is not the paper's": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"policy": "rloo"}, AGG: "seq-mean-token-sum", GROUP_SIZE: 2},
        f"warning {NODE}.advantage",
        "it is 'grpo', and the advantage in the paper of 'rloo' is 'rloo' set advantage=rloo",
    ),
    "verl's advantage beside a loss whose paper has another": (
        {
            **WORKERS,
            "algorithm.adv_estimator": "grpo",
            f"{LOSS}.composer": {"policy": "dr_grpo"},
            AGG: "seq-mean-token-sum-norm",
        },
        "warning algorithm.adv_estimator",
        "it is 'grpo', and 'dr_grpo' is 'dr_grpo' set algorithm.adv_estimator=composer/dr_grpo",
    ),
    "a hint in another trainer": (
        {**OURS, f"{NODE}.hint_weight": 0.1},
        f"{NODE}.hint_weight",
        f"it is 0.1, and only the trainer {TRAINER} has a hint channel {MODE}={TRAINER}",
    ),
    "a replay in another trainer": (
        {**OURS, f"{NODE}.replay_weight": 2},
        f"{NODE}.replay_weight",
        f"it is 2, and only the trainer {TRAINER} has a replay channel",
    ),
    "a hint in the legacy trainer": (
        {**HINT, "trainer.use_v1": False},
        f"{NODE}.hint_weight",
        f"{MODE}={TRAINER} verl 0.9 or later, with trainer.use_v1=True",
    ),
    "a policy's weight and no channel": (
        {
            **SYNC,
            **WORKERS,
            **PAPERS,
            f"{NODE}.policy_weight": 0.5,
            f"{LOSS}.composer": {"policy_weight": 0.5},
        },
        f"{NODE}.policy_weight",
        "it is 0.5 no other channel",
    ),
    "hint options without a weight": (
        {**OURS, f"{NODE}.hint_teacher": "live"},
        f"{NODE}.hint_teacher",
        "because hint_weight is 0",
    ),
    "replay options without a weight": (
        {**SYNC, f"{NODE}.replay_loss": "simpo"},
        f"{NODE}.replay_loss",
        "because replay_weight is 0",
    ),
    "an averaged teacher": (
        {**HINT, f"{NODE}.hint_teacher": "ema"},
        f"{NODE}.hint_teacher",
        "ema no average",
    ),
    "a hint's reference": (
        {**HINT, f"{ACTOR}.use_kl_loss": False},
        f"{ACTOR}.use_kl_loss",
        f"hint_teacher 'base' reference {ACTOR}.use_kl_loss=True kl_loss_coef=0",
    ),
    "DPO's reference": (
        {**REPLAY, f"{ACTOR}.use_kl_loss": False},
        f"{ACTOR}.use_kl_loss",
        f"'dpo' {ACTOR}.use_kl_loss=True kl_loss_coef=0",
    ),
    "logits of fused kernels": ({**HINT, FUSED: True}, FUSED, f"logits False {NOT_FOR}"),
    **{
        f"logits: {model} {key}": ({**HINT, f"{model}.{key}": value}, f"{model}.{key}", f"{words} {NOT_FOR}")
        for model in (ACTOR, "actor_rollout_ref.ref")
        for key, value, words in (
            ("ulysses_sequence_parallel_size", 2, "2 part of every sequence"),
            ("fsdp_config.ulysses_sequence_parallel_size", 2, "2 part of every sequence"),
            ("strategy", "megatron", "'megatron' FSDP"),
            ("fsdp_config.pad_to_length", True, "no logits"),
        )
    },
    "dropped groups that only the hint trains": (
        {**SAMPLED, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"},
        "warning algorithm.filter_groups.enable",
        "drops groups of equal rewards False",
    ),
    "dropped groups that only pairs train": (
        {**REPLAY, "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"},
        "warning algorithm.filter_groups.enable",
        "hint and replay",
    ),
    "shuffled pairs": ({**REPLAY, f"{ACTOR}.shuffle": True}, f"{ACTOR}.shuffle", "pairs False"),
    "a mean over replayed rows": (
        {**REPLAY, f"{LOSS}.loss_mode": "geo_mean"},
        f"{LOSS}.loss_mode",
        "replayed composer/gmpo",
    ),
    "a width that replayed rows change": (
        {**REPLAY, AGG: "seq-mean-token-sum-norm"},
        f"{ACTOR}.loss_scale_factor",
        "width data.max_response_length",
    ),
    "options of a trainer that verl does not read": (
        {**SYNC, "trainer.v1.composer_sync.parameter_sync_step": 2},
        "trainer.v1.composer_sync",
        "verl does not read trainer.v1.sync",
    ),
    "two distillations": (
        {**HINT, DISTILLATION: True, f"{DISTILLED}.use_task_rewards": False},
        DISTILLATION,
        "its own loss False",
    ),
    "a distillation without the task's rewards": (
        {**SYNC, DISTILLATION: True, f"{DISTILLED}.use_task_rewards": False},
        f"{DISTILLED}.use_task_rewards",
        f"it is False policy loss 0 neither the advantage nor the policy set it to True {DISTILLATION}=False",
    ),
    "our loss as the policy loss of verl's distillation": (
        {**SYNC, DISTILLATION: True, f"{DISTILLED}.policy_loss_mode": "composer"},
        f"{DISTILLED}.policy_loss_mode",
        f"it is 'composer' takes only 'vanilla' set it to 'vanilla' {LOSS}.loss_mode",
    ),
    "DPPO around the trainer's policy": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv"},
        f"info {BYPASS}",
        f"dppo_tv recomputation {BYPASS}=True",
    ),
    "DPPO without the engine's log-probabilities": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", ROLLOUT: False},
        f"warning {ROLLOUT}",
        f"recomputation {BYPASS}=True {ROLLOUT}=True",
    ),
    "a bypass without the engine's log-probabilities": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", ROLLOUT: False, BYPASS: True},
        ROLLOUT,
        f"bypass_mode needs {ROLLOUT}=True",
    ),
    "a bypass in the legacy trainer": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", BYPASS: True, "trainer.use_v1": False},
        BYPASS,
        "sets loss_mode to its own trainer.use_v1=True",
    ),
}


def of_entropies(logprobs: Any, entropies: Any, mask: Any) -> Any:
    """A loss that asks for an input that verl does not provide."""


def of_rollouts(logprobs: Any, rollout_logprobs: Any, advantages: Any, mask: Any, *, sharpness: float) -> Any:
    """A loss that verl can run."""


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_at_its_key_with_what_to_do(name: str) -> None:
    changes, key, words = TRAPS[name]
    (found,) = judged(tree(changes))
    check(found, key, words)


def check(found: Finding, key: str, words: str) -> None:
    severity, _, key = key.rpartition(" ")
    assert (found.key, found.severity) == (key, severity or "error"), found
    text = f"{found.problem} {found.remedy}"
    assert all(word in text for word in words.split()), text
    assert found.problem and found.remedy and "\n" not in text and " None" not in text


@pytest.mark.parametrize(
    ("changes", "missing"),
    [(HINT, "privileged_context"), (REPLAY, "chosen")],
)
def test_a_file_without_a_channels_column_is_named_with_those_it_has(
    changes: dict[str, Any], missing: str
) -> None:
    (found,) = judged(tree(changes), columns={"a.parquet": ["prompt", "answer"]})
    check(found, "data.train_files", f"{missing} a.parquet answer, prompt")
    custom = {**changes, "data.custom_cls.path": "mine.py"}
    assert judged(tree(custom), columns={"a.parquet": ["prompt"]}) == []
    assert judged(tree(OURS), columns={"a.parquet": ["prompt"]}) == []


@pytest.mark.parametrize(("mode", "policy"), [("composer", "ipo"), ("composer/dppo_tv", "dppo_tv")])
def test_adv_tau_scales_a_hint_that_is_in_the_advantages(mode: str, policy: str) -> None:
    def found(scale: float, estimator: str | None = "advantage") -> list[Finding]:
        options = {"policy": policy, "policy_params": {"adv_tau": scale}, "hint_estimator": estimator}
        workers = {f"{LOSS}.loss_mode": mode, f"{LOSS}._target_": TARGET}
        ours = {f"{NODE}.{name}": value for name, value in options.items()}
        judgement = judged(sent(tree({**SAMPLED, **workers, **ours, **PAPERS, BYPASS: True})))
        return [one for one in judgement if "adv_tau" in str(one)]

    (warning,) = found(0.5)
    check(warning, f"warning {NODE}.hint_weight", "it is 0.1, and adv_tau=0.5 weight 0.05 set 0.2")
    (error,) = found(0.0)
    check(
        error,
        f"{NODE}.policy_params.adv_tau",
        "it is 0 no hint trains" if policy == "ipo" else "trains nothing",
    )
    assert found(1.0) == found(0.5, "score") == []


def test_every_mistake_in_the_options_is_found_at_once() -> None:
    mistakes = {
        f"{NODE}.hint_wieght": 0.1,
        f"{NODE}.advantage": "grop",
        f"{NODE}.policy_params": {"clip_hihg": 0.3, "clip_low": -3},
        f"{NODE}.replay_weight": "1",
        f"{NODE}.rollout_correction": "tis",
    }
    inert = {f"{LOSS}.kl_cov_ratio": 0.1, f"{ACTOR}.tau_pos": 2.0}
    found = judged(sent(tree({**OURS, **WORKERS, **PAPERS, **mistakes, **inert})))
    params = [f"{NODE}.policy_params.clip_hihg", f"{NODE}.policy_params.clip_low"]
    expected = [*(set(mistakes) - {f"{NODE}.policy_params"}), *params, *inert]
    assert sorted(one.key for one in found) == sorted(expected)


@pytest.mark.parametrize("trainer", ["composr_sync", "composer", "nonsense"])
def test_a_wrong_trainer_hides_no_other_mistake_and_makes_none(trainer: str) -> None:
    channels = {f"{NODE}.hint_weight": 0.1, f"{NODE}.replay_weight": 1, f"{ACTOR}.shuffle": True}
    found = judged(tree({MODE: trainer, **channels, f"{ACTOR}.use_kl_loss": False}))
    assert [one.key for one in found] == [MODE, f"{NODE}.hint_top_k"]
    sampled = channels | {f"{NODE}.hint_divergence": "sampled_token"}
    found = judged(tree({MODE: trainer, **sampled, f"{ACTOR}.use_kl_loss": False}), columns={})
    assert [one.key for one in found] == [MODE, f"{ACTOR}.use_kl_loss", f"{ACTOR}.shuffle"]
    found = judged(tree({MODE: "snc", **sampled}))  # verl's own trainer was meant, and has no channels
    assert [one.key for one in found] == [MODE, NODE]


def test_a_mistake_hides_no_other_and_is_not_blamed_on_its_neighbours() -> None:
    """The parameters of a policy whose name is wrong are not examined, and neither is a misspelt weight."""
    wrong = {f"{NODE}.policy": 7, f"{NODE}.policy_params": {"clip_low": -3}, f"{NODE}.hint_top_k": 0}
    found = judged(tree({**OURS, **wrong, f"{NODE}.policy_wieght": 0}))
    assert [one.key for one in found] == [f"{NODE}.policy", f"{NODE}.hint_top_k", f"{NODE}.policy_wieght"]


@pytest.mark.parametrize("by_policy_gradient", [True, False])
@pytest.mark.parametrize(
    ("named", "is_ours"),
    [
        (OURS, True),
        ({"algorithm.adv_estimator": "grpo", f"{LOSS}.loss_mode": "composer/dapo"}, True),
        ({**OURS, "trainer.use_v1": False}, True),
        ({"algorithm.adv_estimator": "grpo"}, False),
        ({MODE: TRAINER, "algorithm.adv_estimator": "grpo"}, False),
    ],
)
def test_a_distillation_without_task_rewards_is_an_error_where_a_loss_is_ours(
    named: dict[str, Any], is_ours: bool, by_policy_gradient: bool
) -> None:
    """Also under use_policy_gradient, where verl logs the metrics of a policy loss that it sets to 0."""
    changes = {DISTILLATION: True, f"{DISTILLED}.use_policy_gradient": by_policy_gradient}
    before = judged(tree({**named, **changes}))
    found = judged(tree({**named, **changes, f"{DISTILLED}.use_task_rewards": False}))
    added = [one.key for one in found if one not in before]
    assert added == [f"{DISTILLED}.use_task_rewards"] * is_ours


def test_a_loss_of_verls_distillation_is_an_error_also_where_no_other_is_ours() -> None:
    theirs = {"algorithm.adv_estimator": "grpo", DISTILLATION: True}
    found = judged(tree({**theirs, f"{DISTILLED}.policy_loss_mode": "composer/dapo"}))
    assert [one.key for one in found] == [f"{DISTILLED}.policy_loss_mode", "algorithm.adv_estimator"]


def test_a_channel_needs_verl_0_9() -> None:
    found = judged(tree({**OURS, f"{NODE}.hint_weight": 0.1}), "0.8.0", environment={MODULES: PLUGIN})
    check(found[0], f"{NODE}.hint_weight", "verl 0.9 or later")
    assert len(found) == 1


# The same, of what is changed in the facts.
ENVIRONMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no verl": (
        {"verl": VERL | {"absent": True, "version": None, "error": "ModuleNotFoundError"}},
        "verl",
        "python, which will train, has no verl uv pip install --python python verl[verl-core] --python",
    ),
    "verl 0.5": (
        {"verl": VERL | {"version": "0.5.0"}, **UNREGISTERED},
        "verl",
        "verl 0.5 refuses an estimator upgrade to 0.6",
    ),
    "verl 0.8 without the variable": (
        {"verl": VERL | {"version": "0.8.0"}, **UNREGISTERED},
        MODULES,
        f"loads no entry points export {MODULES}={PLUGIN}",
    ),
    "verl that does not import": (
        {"verl": VERL | {"error": "ImportError: libcudart"}, **UNREGISTERED},
        "verl",
        'import verl fails in python: ImportError: libcudart python -c "import verl"',
    ),
    "no composer-plugins": (
        {"package": "ModuleNotFoundError: No module named 'composer_plugins'", **UNREGISTERED},
        "composer-plugins",
        "python, which will train, cannot import uv pip install --python python 'composer-plugins'",
    ),
    "a plugin that failed": (
        {"verl": VERL | {"failure": "NameError: x"}, **UNREGISTERED},
        "verl.plugins",
        'does not show the error: NameError: x python -W default -c "import verl"',
    ),
    "a plugin that says nothing": (UNREGISTERED, "verl.plugins", f'python -c "import {PLUGIN}"'),
    "losses and no estimators": (
        {"losses": ["vanilla"]},
        "verl.plugins",
        "verl knows no policy loss 'composer' after import verl",
    ),
    "no entry point": (
        {"entry_points": {"other": "x"}, **UNREGISTERED},
        "verl.plugins",
        "without its entry point --reinstall",
    ),
    "plugins off": (
        {"environment": {PLUGINS: "None"}, **UNREGISTERED},
        PLUGINS,
        f"none loads no plugin unset {PLUGINS}",
    ),
    "plugins by a list": (
        {"environment": {PLUGINS: "mine, other"}, **UNREGISTERED},
        PLUGINS,
        f"'mine, other' does not allow it export {PLUGINS}=mine,other,composer",
    ),
    "a space": (
        {
            "environment": {MODULES: f"{PLUGIN}, b"},
            "verl": VERL | {"modules": {PLUGIN: "", " b": "ModuleNotFoundError"}},
        },
        MODULES,
        f"strips no spaces export {MODULES}={PLUGIN},b",
    ),
    "a comma too many": ({"environment": {MODULES: ","}}, MODULES, f"unset {MODULES}"),
    "a module that does not import": (
        {"environment": {MODULES: "b"}, "verl": VERL | {"modules": {"b": "ModuleNotFoundError: No b"}}},
        MODULES,
        "b does not import ModuleNotFoundError: No b correct or remove b",
    ),
    "a new TRL": (
        {"trl": {"version": "1.16.0", "exports": False, "name": "AutoModelWithValueHead"}},
        "trl",
        "TRL 1.16.0 AutoModelWithValueHead every actor ends an environment of its own",
    ),
    "no TransferQueue": (
        {"transfer_queue": QUEUE | {"present": False, "version": None}},
        "transfer_queue",
        "TransferQueue>=0.1.10 is not installed verl[verl-core] trainer.use_v1=False",
    ),
    "an old TransferQueue": (
        {"transfer_queue": QUEUE | {"version": "0.1.2", "fits": False}},
        "warning transfer_queue",
        "TransferQueue is 0.1.2, and verl needs TransferQueue>=0.1.10 verl[verl-core]",
    ),
    "another module in a running cluster": (
        {"environment": {MODULES: "mine", "RAY_ADDRESS": "10.0.0.1:6379"}},
        f"warning {MODULES}",
        f"cluster at 10.0.0.1:6379 +ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}='mine' every node",
    ),
    "an allow-list in a running cluster": (
        {"environment": {PLUGINS: "composer", "RAY_ADDRESS": "auto"}},
        f"warning {PLUGINS}",
        "cluster at auto every node",
    ),
    "our module in a running cluster": (
        {"environment": {MODULES: PLUGIN, "RAY_ADDRESS": "auto"}, "entry_points": {}},
        MODULES,
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}='{PLUGIN}'",
    ),
    "a library that does not import": (
        {"library": "ModuleNotFoundError: No module named 'lib'"},
        "actor_rollout_ref.model.external_lib",
        "'lib' does not import correct it, or remove it",
    ),
    "losses and no trainer": ({"trainers": ["sync"]}, MODE, f"no trainer '{TRAINER}' verl[verl-core]"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_wrong_with_the_environment_is_found(name: str) -> None:
    others, key, words = ENVIRONMENTS[name]
    usable = not others.get("verl", VERL)["error"]
    config = tree({**SYNC, "actor_rollout_ref.model.external_lib": "lib"})
    (found,) = judged(config if usable else None, **others)
    check(found, key, words)


def test_what_is_mended_in_the_environment_is_not_complained_of() -> None:
    ours, cluster = {MODULES: PLUGIN}, {"RAY_ADDRESS": "auto"}
    old = {**NAMES, "trainers": []}
    without = {"trainer.use_v1": None, MODE: None}
    assert judged(tree({**OURS, **without}), environment=ours, verl=VERL | {"version": "0.8.0"}, **old) == []
    forwarded = {f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}": PLUGIN}
    assert judged(tree({**OURS, **forwarded}), environment=ours | cluster, entry_points={}) == []
    assert judged(tree(OURS), environment=ours | {"RAY_ADDRESS": "local"}) == []
    assert judged(tree(OURS), environment=ours) == judged(tree(OURS), environment=cluster) == []
    allowed = {PLUGINS: "mine,composer"}
    assert judged(tree(OURS), environment=allowed) == []
    legacy = tree({**OURS, "trainer.use_v1": False})
    assert judged(legacy, transfer_queue=QUEUE | {"present": False}) == []
    trl = {"version": "0.27.0", "exports": True, "name": "AutoModelWithValueHead"}
    assert judged(tree(OURS), trl=trl) == []
    megatron = tree({**OURS, f"{ACTOR}.strategy": "megatron"})
    assert judged(megatron, trl=trl | {"exports": False}) == []


def test_a_cluster_may_be_named_in_the_config() -> None:
    config = tree({**OURS, "ray_kwargs.ray_init.address": "ray://head:10001"})
    (found,) = judged(config, environment={MODULES: "mine"})
    check(found, f"warning {MODULES}", "cluster at ray://head:10001")


def test_what_is_not_registered_is_one_finding() -> None:
    """Not one for each name of ours in the config as well."""
    found = judged(tree({**HINT, f"{LOSS}.loss_mode": "composer/cispo"}), **UNREGISTERED)
    assert [one.key for one in found] == ["verl.plugins"]


def test_the_version_that_is_told_is_the_one_judged_by() -> None:
    found = judged(None, "0.8")
    check(found[0], MODULES, "verl 0.8 will know no estimator no entry points")
    assert judged(None, "0.8", environment={MODULES: PLUGIN}) == []
    check(judged(None, "0.5.0")[0], "verl", "verl 0.5 refuses")
    with pytest.raises(ConfigError, match="--version: 'newest' is not a version; write it as 0.9.1"):
        judged(None, "newest")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "ConfigCompositionException: Could not override 'algorithm.composer.x'. To append to your config "
            "use +algorithm.composer.x=1",
            "write +algorithm.composer.x=1",
        ),
        ("ScannerError: mapping values are not allowed here", "correct the file or the override"),
    ],
)
def test_what_hydra_refuses_is_a_finding_with_its_words(message: str, remedy: str) -> None:
    (found,) = judged(None, composition=[(message, "")])
    check(found, "hydra", f"cannot be composed {message} {remedy}")


def test_a_file_without_verls_defaults_is_found() -> None:
    (found,) = judged({"algorithm": {"adv_estimator": "composer"}, "actor_rollout_ref": {"actor": None}})
    check(found, "defaults", "nothing of verl's own [ppo_trainer, _self_]")


SHAPES: tuple[Any, ...] = (3, "", [], ["composer"], {"a": 1}, True, float("nan"), None)


def test_a_value_of_any_shape_is_a_finding_or_nothing() -> None:
    keys = [*DEFAULTS, NODE, f"{LOSS}.composer", "algorithm", "trainer", "trainer.v1", "data", "ray_kwargs"]
    keys += [f"{NODE}.{name}" for name in ("policy", "hint_weight", "hint_params", "hint_teacher")]
    for key in keys:
        for shape in SHAPES:
            made = sent(tree(HINT))
            *above, last = key.split(".")
            holder = made
            for name in above:
                holder = holder[name]
            holder[last] = shape
            for found in judged(made):
                assert found.key and found.problem and found.remedy


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the doctor asks of an interpreter in which all is well."""
    seen: list[tuple[Any, ...]] = []

    def ask(python: str, _: Path, request: str) -> dict[str, Any]:
        seen.append((python, json.loads(request)))
        return answered(tree(OURS) if json.loads(request)["compose"] else None)

    monkeypatch.setattr(verl_doctor, "ask", ask)
    return seen


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, list(arguments), catch_exceptions=False)
    return done.exit_code, done.output


def test_files_and_overrides_are_told_apart(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    def request() -> tuple[Any, ...]:
        python, sent_ = asked[-1]
        return python, *(sent_[key] for key in ("compose", "folder", "name", "overrides"))

    file = tmp_path / "lr=1.yaml"
    file.write_text("algorithm: {adv_estimator: composer}")
    assert run("--verl", "--python", "py") == (0, "the environment: nothing found, against verl 0.9.1 (py)\n")
    assert request() == ("py", False, "", "ppo_trainer", [])
    overrides = ["a.b=c.yaml", "+c=hdfs://x//y", "~d", "++e=1"]
    status, output = run("--verl", *overrides[:2], str(file), *overrides[2:])
    assert status == 0 and output.startswith(f"{file} + 4 overrides: nothing found, against verl 0.9.1")
    assert output.endswith(f", composed with --config-dir {tmp_path} --config-name lr=1\n")
    assert request()[1:] == (True, str(tmp_path), "lr=1.yaml", overrides)
    status, output = run("--framework", "verl", "a=1")
    assert status == 0 and output.startswith("1 override: nothing found")
    assert request()[1:] == (True, "", "ppo_trainer", ["a=1"])


def test_json_has_the_overrides_too(asked: list[tuple[Any, ...]]) -> None:
    status, output = run("--verl", "--json", "a=1")
    shown = json.loads(output)
    assert status == 0 and shown.pop("against").startswith("verl 0.9.1")
    assert shown == {"framework": "verl", "files": [], "overrides": ["a=1"], "findings": []}


def test_the_exit_status_is_1_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_doctor, "ask", lambda *_: answered(tree({"algorithm.adv_estimator": "grpo"})))
    assert run("--verl", "a=1")[0] == 0
    monkeypatch.setattr(verl_doctor, "ask", lambda *_: answered(None, **ENVIRONMENTS["no verl"][0]))
    status, output = run("--verl", "--python", "py")
    assert status == 1 and output.startswith("error: verl\n  py, which will train, has no verl\n  -> uv pip")
    assert "the environment: 1 error, against verl 0.6 to 0.9 (none is installed for py" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to examine give a config file, or --verl"),
        (["--framework", "prime-rl"], "no config file of prime-rl .toml"),
        (["algorithm.adv_estimator=composer"], "not known by the suffix --verl"),
        (["--verl", "--framework", "prime-rl"], "--verl: --framework prime-rl is given too"),
        (["--verl", "a.yaml", "b.yaml"], "a.yaml, b.yaml several files main_ppo takes one"),
        (["--verl", "rl.toml"], "rl.toml: hydra reads files that end in .yaml"),
        (["--verl", "nowhere.yaml"], "nowhere.yaml: it cannot be read: No such file"),
    ],
)
def test_what_cannot_be_examined_is_one_error(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(*arguments)
    assert all(word in str(error.value) for word in words.split()) and "\n" not in str(error.value)


def test_the_help_says_what_verl_is_given() -> None:
    command = [sys.executable, "-m", "composer_plugins", "doctor", "--help"]
    shown = subprocess.check_output(command, cwd=ROOT, text=True, env={"COLUMNS": "200", "PATH": ""})
    assert "--verl" in shown and "main_ppo --config-dir FOLDER --config-name NAME" in shown


def test_a_release_that_nobody_has_read_is_marked() -> None:
    facts = answered(None, verl=VERL | {"version": "0.10.0"})
    assert verl_doctor.compared_with(Target("py", None), facts, (0, 10)).endswith(
        "the doctor knows 0.6 to 0.9"
    )
    assert verl_doctor.compared_with(Target("py", None), facts, (0, 9)).endswith("verl 0.10.0 (py)")


def test_the_doctor_loads_neither_verl_nor_hydra() -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('error', UserWarning)\n"
        "from composer_plugins.adapters.verl_plugin import doctor\n"
        "from composer_plugins.adapters.verl_plugin.doctor import options as r\n"
        f"facts = {FACTS!r} | {{'config': {tree(HINT)!r}}}\n"
        f"facts['findings'] = r.findings(r.Run(facts['config']), facts, {PARQUET!r})\n"
        "assert not list(doctor.judge(facts, doctor.Target('python', None), (0, 9)))\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"omegaconf", "hydra", "ray", "verl"} & set(loaded)


def test_the_doctors_own_process_loads_no_torch() -> None:
    program = "import sys\nfrom composer_plugins.adapters.verl_plugin import doctor\nprint(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert "torch" not in loaded


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    source = ast.parse((ROOT / "adapters/verl_plugin/doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(source) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_the_columns_of_parquet_and_json_are_read_and_other_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": 1}\n\n{"prompt": 2, "chosen": null}\n')
    (tmp_path / "b.json").write_text('\n [{"prompt": 1, "rejected": "x"}, {"hint": "y"}]')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "c.csv").write_text("prompt")
    names = {
        name: str(tmp_path / name) for name in ("a.jsonl", "b.json", "broken.json", "c.csv", "gone.json")
    }
    assert file_columns([*names.values(), "hdfs://x/a.jsonl"]) == {
        names["a.jsonl"]: ["prompt", "chosen"],
        names["b.json"]: ["prompt", "rejected", "hint"],
    }


def test_a_data_file_that_is_not_there_is_a_warning_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    here, gone = str(tmp_path / "a.jsonl"), str(tmp_path / "gone.parquet")
    data = {"train_files": [here, "hdfs://x/a.parquet"], "val_files": gone}
    (found,) = absent_files({"data": data})
    assert (found.severity, found.key) == ("warning", "data.val_files")
    assert f"there is no {gone}, looked for from {Path.cwd()}" in found.problem
    assert not list(absent_files({"data": {"train_files": "~/data/rlhf/gsm8k/train.parquet"}}))
    assert not list(absent_files({"data": {"train_files": None}})) and not list(absent_files({}))
