"""`composer-plugins doctor --verl`: the judgement, of what the probe told. verl itself is not needed here."""

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

from composer_plugins import doctor
from composer_plugins.adapters.verl_doctor import doctor as verl_doctor
from composer_plugins.adapters.verl_doctor import settings
from composer_plugins.adapters.verl_doctor.doctor_config import TARGET
from composer_plugins.adapters.verl_doctor.doctor_environment import number_of
from composer_plugins.adapters.verl_parts.rules import TRAINER
from composer_plugins.doctor import Finding, Target
from composer_plugins.errors import ConfigError
from parity_tests.support.paths import ROOT

APP = typer.Typer()
APP.command()(doctor.doctor)

PLUGIN = "composer_plugins.adapters.verl_plugin"
MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
ACTOR, NODE = "actor_rollout_ref.actor", "algorithm.composer"
LOSS, MODE = f"{ACTOR}.policy_loss", "trainer.v1.trainer_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
ROLLOUT = "actor_rollout_ref.rollout.calculate_log_probs"
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
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.model.external_lib": None,
    FUSED: False,
    ROLLOUT: True,
    "trainer.project_name": "verl_examples",
    "trainer.use_v1": True,
    MODE: "sync",
    "data.train_files": "train.parquet",
    "data.custom_cls.path": None,
    "distillation.enabled": False,
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
    "estimators": ["composer", "composer/rloo", "gae", "grpo", "rloo"],
    "losses": ["composer", "composer/cispo", "composer/dppo_tv", "gspo", "vanilla"],
    "trainers": ["colocate_async", TRAINER, "separate_async", "sync"],
}
VERL = {"version": "0.9.1", "error": "", "absent": False, "modules": {}, "said": []}
QUEUE = {"present": True, "version": "0.1.11", "wanted": "TransferQueue>=0.1.10", "fits": True}
FACTS: dict[str, Any] = {
    "package": "",
    "entry_points": {"composer": PLUGIN},
    "environment": {},
    "verl": VERL,
    "trl": None,
    "transfer_queue": QUEUE,
    "composition": "",
    "library": "",
    "columns": PARQUET,
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


def told(config: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """What a probe answers, of an environment in which all is well."""
    facts = {**FACTS, "config": config, **others}
    return facts | {"settings": settings.read(config, facts["columns"]) if config else None}


def judged(config: dict[str, Any] | None, version: str | None = None, **others: Any) -> list[Finding]:
    facts = told(config, **others)
    release = number_of(version or facts["verl"]["version"])
    return list(verl_doctor.judge(facts, Target("python", version), release))


SOUND: dict[str, dict[str, Any]] = {
    "an estimator": OURS,
    "a named estimator": {"algorithm.adv_estimator": "composer/rloo"},
    "its parameters": {**OURS, f"{NODE}.advantage": "rloo"},
    "a policy loss": {f"{LOSS}.loss_mode": "composer/cispo", "algorithm.adv_estimator": "grpo"},
    "the same said twice": {f"{LOSS}.loss_mode": "composer/cispo", **OURS, f"{NODE}.policy": "cispo"},
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
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_config_is_met_with_silence(name: str) -> None:
    assert judged(tree(SOUND[name])) == []


def test_a_policy_with_parameters_that_the_workers_see_is_met_with_silence() -> None:
    policy = {f"{NODE}.policy": "cispo", f"{NODE}.policy_params": {"clip_high": 4.0}}
    assert judged(sent(tree({**OURS, **WORKERS, **policy}))) == []
    assert judged(sent(tree({**HINT, **WORKERS, **policy, f"{NODE}.policy_weight": 0.5}))) == []


def test_an_environment_alone_is_judged_without_a_config() -> None:
    assert judged(None) == []
    keys = [one.key for one in judged(None, transfer_queue=QUEUE | {"present": False})]
    assert keys == ["transfer_queue"]


# What is changed in the config, the key, the severity, and words that the finding has.
TRAPS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "an unknown estimator": (
        {"algorithm.adv_estimator": "composer/rlo"},
        "algorithm.adv_estimator",
        "error",
        "unknown estimator 'composer/rlo'; verl says so after the first rollout did you mean 'composer/rloo'",
    ),
    "an unknown loss": (
        {f"{LOSS}.loss_mode": "composer/cipso"},
        f"{LOSS}.loss_mode",
        "error",
        "unknown policy loss 'composer/cipso' did you mean 'composer/cispo'",
    ),
    "an unknown loss of verl's": (
        {**OURS, f"{LOSS}.loss_mode": "vanila"},
        f"{LOSS}.loss_mode",
        "error",
        "'vanila' did you mean 'vanilla'",
    ),
    "an unknown trainer": (
        {**OURS, MODE: "snc"},
        MODE,
        "error",
        "unknown trainer 'snc' did you mean 'sync'",
    ),
    "an unknown option": (
        {**OURS, f"{NODE}.hint_wieght": 0.1},
        f"{NODE}.hint_wieght",
        "error",
        "unknown option 'hint_wieght' did you mean 'hint_weight'",
    ),
    "an option of the wrong type": (
        {**OURS, f"{NODE}.hint_weight": "0.1"},
        f"{NODE}.hint_weight",
        "error",
        "hint_weight is '0.1': input should be a valid number",
    ),
    "an unknown advantage": (
        {**OURS, f"{NODE}.advantage": "grop"},
        f"{NODE}.advantage",
        "error",
        "unknown advantage 'grop' did you mean 'grpo'",
    ),
    "a critic": (
        {**OURS, "critic.enable": True},
        "critic.enable",
        "error",
        "hands its advantages over as returns",
    ),
    "two advantages": (
        {"algorithm.adv_estimator": "composer/rloo", f"{NODE}.advantage": "grpo"},
        f"{NODE}.advantage",
        "error",
        "advantage is 'grpo' beside composer/rloo say composer alone",
    ),
    "what verl does itself": (
        {**OURS, f"{NODE}.mismatch": "tis"},
        f"{NODE}.mismatch",
        "error",
        "rollout_correction remove it",
    ),
    "no table": (
        {**OURS, NODE: 3},
        NODE,
        "error",
        "3 wanted a table of options",
    ),
    "options that nobody reads": (
        {"algorithm.adv_estimator": "grpo", f"{NODE}.advantage": "rloo"},
        NODE,
        "error",
        "read by nobody: adv_estimator is 'grpo', loss_mode 'vanilla' algorithm.adv_estimator=composer",
    ),
    "nothing of ours": (
        {"algorithm.adv_estimator": "grpo"},
        "algorithm.adv_estimator",
        "warning",
        "verl trains with its own algorithm.adv_estimator=composer",
    ),
    "an advantage beside another estimator": (
        {"algorithm.adv_estimator": "grpo", f"{LOSS}.loss_mode": "composer", f"{NODE}.advantage": "rloo"},
        f"{NODE}.advantage",
        "error",
        "not run: algorithm.adv_estimator is 'grpo'",
    ),
    "a policy beside verl's loss": (
        {**OURS, f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        "error",
        f"not run: {LOSS}.loss_mode is 'vanilla' {LOSS}.loss_mode=composer ${{{NODE}}}",
    ),
    "parameters that the workers do not see": (
        {**OURS, f"{LOSS}.loss_mode": "composer", f"{NODE}.policy_params": {"clip_high": 0.3}},
        f"{NODE}.policy_params",
        "error",
        f"workers do not see it {LOSS}._target_={TARGET} +{LOSS}.composer='${{{NODE}}}'",
    ),
    "a policy that the workers do not see": (
        {**OURS, f"{LOSS}.loss_mode": "composer", f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        "error",
        "workers do not see it",
    ),
    "a target without the node": (
        {**OURS, **WORKERS, f"{NODE}.policy": "cispo"},
        f"{NODE}.policy",
        "error",
        "workers do not see it",
    ),
    "a node without its target": (
        {**OURS, f"{LOSS}.loss_mode": "composer", f"{LOSS}.composer": {"policy": "cispo"}},
        f"{LOSS}._target_",
        "error",
        f"verl.workers.config.PolicyLossConfig does not take TypeError {LOSS}._target_={TARGET}",
    ),
    "an unknown policy in the workers' node": (
        {**OURS, **WORKERS, f"{LOSS}.composer": {"policy": "cipso"}},
        f"{LOSS}.composer.policy",
        "error",
        "unknown policy 'cipso' did you mean 'cispo'",
    ),
    "a hint that nobody delivers": (
        {**OURS, f"{NODE}.hint_weight": 0.1},
        f"{NODE}.hint_weight",
        "error",
        f"hint_weight = 0.1, and the trainer 'sync' does not {MODE}={TRAINER}",
    ),
    "a replay that nobody delivers": (
        {**OURS, f"{NODE}.replay_weight": 2},
        f"{NODE}.replay_weight",
        "error",
        "replay_weight = 2, and the trainer",
    ),
    "a hint in the legacy trainer": (
        {**HINT, "trainer.use_v1": False},
        f"{NODE}.hint_weight",
        "error",
        f"legacy trainer trainer.use_v1=True {MODE}={TRAINER}",
    ),
    "hint options without a weight": (
        {**OURS, f"{NODE}.hint_teacher": "live"},
        f"{NODE}.hint_teacher",
        "warning",
        "does nothing without hint_weight",
    ),
    "hint options without a weight, in our trainer": (
        {**SYNC, f"{NODE}.hint_teacher": "live"},
        f"{NODE}.hint_teacher",
        "error",
        "without a hint_weight",
    ),
    "an averaged teacher": (
        {**HINT, f"{NODE}.hint_teacher": "ema"},
        f"{NODE}.hint_teacher",
        "error",
        "ema no average",
    ),
    "a hint's reference": (
        {**HINT, f"{ACTOR}.use_kl_loss": False},
        f"{ACTOR}.use_kl_loss",
        "error",
        f"reference {ACTOR}.use_kl_loss=True kl_loss_coef=0",
    ),
    "DPO's reference": (
        {**REPLAY, f"{ACTOR}.use_kl_loss": False},
        f"{ACTOR}.use_kl_loss",
        "error",
        f"'dpo' {ACTOR}.use_kl_loss=True kl_loss_coef=0",
    ),
    "logits of fused kernels": ({**HINT, FUSED: True}, FUSED, "error", "logits False"),
    "logits of a part of the sequence": (
        {**HINT, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "error",
        "2 1",
    ),
    "logits of another engine": (
        {**HINT, f"{ACTOR}.strategy": "megatron"},
        f"{ACTOR}.strategy",
        "error",
        "'megatron' FSDP",
    ),
    "shuffled pairs": ({**REPLAY, f"{ACTOR}.shuffle": True}, f"{ACTOR}.shuffle", "error", "pairs False"),
    "two distillations": (
        {**HINT, "distillation.enabled": True},
        "distillation.enabled",
        "error",
        "its own loss False",
    ),
    "DPPO around the trainer's policy": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv"},
        BYPASS,
        "info",
        f"dppo_tv recomputation {BYPASS}=True",
    ),
    "DPPO without the engine's log-probabilities": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", ROLLOUT: False},
        ROLLOUT,
        "warning",
        f"recomputation {BYPASS}=True {ROLLOUT}=True",
    ),
    "a bypass without the engine's log-probabilities": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", ROLLOUT: False, BYPASS: True},
        ROLLOUT,
        "error",
        f"bypass_mode wants {ROLLOUT}=True",
    ),
    "a bypass in the legacy trainer": (
        {f"{LOSS}.loss_mode": "composer/dppo_tv", BYPASS: True, "trainer.use_v1": False},
        BYPASS,
        "error",
        "sets loss_mode to its own trainer.use_v1=True",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_at_its_key_with_what_to_do(name: str) -> None:
    changes, key, severity, words = TRAPS[name]
    (found,) = judged(tree(changes))
    check(found, key, severity, words)


def check(found: Finding, key: str, severity: str, words: str) -> None:
    assert (found.key, found.severity) == (key, severity), found
    said = f"{found.what} {found.remedy}"
    assert all(word in said for word in words.split()), said
    assert found.what and found.remedy and "\n" not in said and " None" not in said


@pytest.mark.parametrize(
    ("changes", "missing"),
    [(HINT, "privileged_context"), (REPLAY, "chosen")],
)
def test_a_file_without_a_channels_column_is_named_with_those_it_has(
    changes: dict[str, Any], missing: str
) -> None:
    (found,) = judged(tree(changes), columns={"a.parquet": ["prompt", "answer"]})
    check(found, "data.train_files", "error", f"{missing} a.parquet answer, prompt")
    custom = {**changes, "data.custom_cls.path": "mine.py"}
    assert judged(tree(custom), columns={"a.parquet": ["prompt"]}) == []
    assert judged(tree(OURS), columns={"a.parquet": ["prompt"]}) == []


def test_a_channel_needs_verl_0_9() -> None:
    found = judged(tree({**OURS, f"{NODE}.hint_weight": 0.1}), "0.8.0", environment={MODULES: PLUGIN})
    check(found[0], f"{NODE}.hint_weight", "error", "verl before 0.9 upgrade to 0.9")
    assert len(found) == 1


# What is changed in the facts, the key, the severity, and words that the finding has.
ENVIRONMENTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no verl": (
        {"verl": VERL | {"absent": True, "version": None, "error": "ModuleNotFoundError"}},
        "verl",
        "error",
        "python, which will train, has no verl uv pip install --python python verl[verl-core] --python",
    ),
    "verl 0.5": (
        {"verl": VERL | {"version": "0.5.0"}, **UNREGISTERED},
        "verl",
        "error",
        "verl 0.5 refuses an estimator upgrade to 0.6",
    ),
    "verl 0.8 without the variable": (
        {"verl": VERL | {"version": "0.8.0"}, **UNREGISTERED},
        MODULES,
        "error",
        f"loads no entry points export {MODULES}={PLUGIN}",
    ),
    "verl that does not import": (
        {"verl": VERL | {"error": "ImportError: libcudart"}, **UNREGISTERED},
        "verl",
        "error",
        'import verl fails in python: ImportError: libcudart python -c "import verl"',
    ),
    "no composer-plugins": (
        {"package": "ModuleNotFoundError: No module named 'composer_plugins'", **UNREGISTERED},
        "composer-plugins",
        "error",
        "cannot be used by python, which will train uv pip install --python python 'composer-plugins'",
    ),
    "a plugin that failed": (
        {
            "verl": VERL | {"said": ["composer-plugins is not registered in verl: NameError: x"]},
            **UNREGISTERED,
        },
        "verl.plugins",
        "error",
        'does not show: NameError: x python -W default -c "import verl"',
    ),
    "a plugin that says nothing": (UNREGISTERED, "verl.plugins", "error", f'python -c "import {PLUGIN}"'),
    "losses and no estimators": (
        {"losses": ["vanilla"]},
        "verl.plugins",
        "error",
        "verl knows no policy loss 'composer' after import verl",
    ),
    "no entry point": (
        {"entry_points": {"other": "x"}, **UNREGISTERED},
        "verl.plugins",
        "error",
        "without its entry point --reinstall",
    ),
    "plugins off": (
        {"environment": {PLUGINS: "None"}, **UNREGISTERED},
        PLUGINS,
        "error",
        f"none loads no plugin unset {PLUGINS}",
    ),
    "plugins by a list": (
        {"environment": {PLUGINS: "mine, other"}, **UNREGISTERED},
        PLUGINS,
        "error",
        f"'mine, other' does not allow it export {PLUGINS}=mine,other,composer",
    ),
    "a space": (
        {
            "environment": {MODULES: f"{PLUGIN}, b"},
            "verl": VERL | {"modules": {PLUGIN: "", " b": "ModuleNotFoundError"}},
        },
        MODULES,
        "error",
        f"strips no spaces export {MODULES}={PLUGIN},b",
    ),
    "a comma too many": ({"environment": {MODULES: ","}}, MODULES, "error", f"unset {MODULES}"),
    "a module that does not import": (
        {"environment": {MODULES: "b"}, "verl": VERL | {"modules": {"b": "ModuleNotFoundError: No b"}}},
        MODULES,
        "error",
        "b does not import ModuleNotFoundError: No b mend or remove b",
    ),
    "a new TRL": (
        {"trl": {"version": "1.16.0", "exports": False, "name": "AutoModelWithValueHead"}},
        "trl",
        "error",
        "TRL 1.16.0 AutoModelWithValueHead every actor dies one environment for verl, another for TRL",
    ),
    "no TransferQueue": (
        {"transfer_queue": QUEUE | {"present": False, "version": None}},
        "transfer_queue",
        "error",
        "TransferQueue>=0.1.10 is not installed verl[verl-core] trainer.use_v1=False",
    ),
    "an old TransferQueue": (
        {"transfer_queue": QUEUE | {"version": "0.1.2", "fits": False}},
        "transfer_queue",
        "warning",
        "TransferQueue 0.1.2; verl wants TransferQueue>=0.1.10 verl[verl-core]",
    ),
    "another module in a running cluster": (
        {"environment": {MODULES: "mine", "RAY_ADDRESS": "10.0.0.1:6379"}},
        MODULES,
        "warning",
        f"cluster at 10.0.0.1:6379 +ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}='mine' every node",
    ),
    "an allow-list in a running cluster": (
        {"environment": {PLUGINS: "composer", "RAY_ADDRESS": "auto"}},
        PLUGINS,
        "warning",
        "cluster at auto every node",
    ),
    "our module in a running cluster": (
        {"environment": {MODULES: PLUGIN, "RAY_ADDRESS": "auto"}, "entry_points": {}},
        MODULES,
        "error",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}='{PLUGIN}'",
    ),
    "a library that does not import": (
        {"library": "ModuleNotFoundError: No module named 'lib'"},
        "actor_rollout_ref.model.external_lib",
        "error",
        "'lib' does not import mend or remove it",
    ),
    "losses and no trainer": (
        {"trainers": ["sync"]},
        MODE,
        "error",
        f"no trainer '{TRAINER}' verl[verl-core]",
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_wrong_with_the_environment_is_found(name: str) -> None:
    others, key, severity, words = ENVIRONMENTS[name]
    usable = not others.get("verl", VERL)["error"]
    config = tree({**SYNC, "actor_rollout_ref.model.external_lib": "lib"})
    (found,) = judged(config if usable else None, **others)
    check(found, key, severity, words)


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
    check(found, MODULES, "warning", "cluster at ray://head:10001")


def test_what_is_not_registered_is_one_finding() -> None:
    """Not one for each name of ours in the config as well."""
    found = judged(tree({**HINT, f"{LOSS}.loss_mode": "composer/cispo"}), **UNREGISTERED)
    assert [one.key for one in found] == ["verl.plugins"]


def test_the_version_that_is_told_is_the_one_judged_by() -> None:
    found = judged(None, "0.8")
    check(found[0], MODULES, "error", "verl 0.8 will know no estimator no entry points")
    assert judged(None, "0.8", environment={MODULES: PLUGIN}) == []
    check(judged(None, "0.5.0")[0], "verl", "error", "verl 0.5 refuses")
    with pytest.raises(ConfigError, match="--version 'newest' is no version; wanted 0.9.1"):
        judged(None, "newest")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "ConfigCompositionException: Could not override 'algorithm.composer.x'. To append to your config "
            "use +algorithm.composer.x=1",
            "write +algorithm.composer.x=1",
        ),
        ("ScannerError: mapping values are not allowed here", "mend the file or the override"),
    ],
)
def test_what_hydra_refuses_is_a_finding_with_its_words(message: str, remedy: str) -> None:
    (found,) = judged(None, composition=message)
    check(found, "hydra", "error", f"cannot be composed {message} {remedy}")


def test_a_file_without_verls_defaults_is_found() -> None:
    (found,) = judged({"algorithm": {"adv_estimator": "composer"}, "actor_rollout_ref": {"actor": None}})
    check(found, "defaults", "error", "nothing of verl's own [ppo_trainer, _self_]")


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
                assert found.key and found.what and found.remedy


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the doctor asks of an interpreter in which all is well."""
    seen: list[tuple[Any, ...]] = []

    def ask(python: str, _: Path, request: str) -> dict[str, Any]:
        seen.append((python, json.loads(request)))
        return told(tree(OURS) if json.loads(request)["compose"] else None)

    monkeypatch.setattr(verl_doctor, "ask", ask)
    return seen


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, list(arguments), catch_exceptions=False)
    return done.exit_code, done.output


def test_files_and_overrides_are_told_apart(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "lr=1.yaml"
    file.write_text("algorithm: {adv_estimator: composer}")
    assert run("--verl", "--python", "py") == (0, "the environment: nothing found, against verl 0.9.1 (py)\n")
    assert asked[-1] == ("py", {"compose": False, "folder": "", "name": "ppo_trainer", "overrides": []})
    overrides = ["a.b=c.yaml", "+c=hdfs://x//y", "~d", "++e=1"]
    status, output = run("--verl", *overrides[:2], str(file), *overrides[2:])
    assert status == 0 and output.startswith(f"{file} + 4 overrides: nothing found, against verl 0.9.1")
    assert output.endswith(f", composed with --config-dir {tmp_path} --config-name lr=1\n")
    request = {"compose": True, "folder": str(tmp_path), "name": "lr=1.yaml", "overrides": overrides}
    assert asked[-1][1] == request
    status, output = run("--framework", "verl", "a=1")
    assert status == 0 and output.startswith("1 override: nothing found")
    assert asked[-1][1] == {"compose": True, "folder": "", "name": "ppo_trainer", "overrides": ["a=1"]}


def test_json_has_the_overrides_too(asked: list[tuple[Any, ...]]) -> None:
    status, output = run("--verl", "--json", "a=1")
    shown = json.loads(output)
    assert status == 0 and shown.pop("against").startswith("verl 0.9.1")
    assert shown == {"framework": "verl", "files": [], "overrides": ["a=1"], "findings": []}


def test_the_exit_status_is_1_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_doctor, "ask", lambda *_: told(tree({"algorithm.adv_estimator": "grpo"})))
    assert run("--verl", "a=1")[0] == 0
    monkeypatch.setattr(verl_doctor, "ask", lambda *_: told(None, **ENVIRONMENTS["no verl"][0]))
    status, output = run("--verl", "--python", "py")
    assert status == 1 and output.startswith("error: verl\n  py, which will train, has no verl\n  -> uv pip")
    assert "the environment: 1 error, against verl 0.6 to 0.9 (none is installed for py" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to examine: give a config file, or --verl"),
        (["--framework", "prime-rl"], "no config file given; wanted prime-rl's: .toml"),
        (["algorithm.adv_estimator=composer"], "by its suffix no config that the doctor knows or --verl"),
        (["--verl", "--framework", "prime-rl"], "--verl and --framework prime-rl: say one of them"),
        (["--verl", "a.yaml", "b.yaml"], "a.yaml, b.yaml: main_ppo takes one config"),
        (["--verl", "rl.toml"], "rl.toml: hydra reads files that end in .yaml"),
        (["--verl", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file"),
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
    facts = told(None, verl=VERL | {"version": "0.10.0"})
    assert verl_doctor.against(Target("py", None), facts, (0, 10)).endswith("the doctor knows 0.6 to 0.9")
    assert verl_doctor.against(Target("py", None), facts, (0, 9)).endswith("verl 0.10.0 (py)")


def test_the_doctor_loads_neither_verl_nor_hydra() -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('error', UserWarning)\n"
        "from composer_plugins.adapters.verl_doctor import doctor as d, settings\n"
        f"tree = {tree(HINT)!r}\n"
        f"facts = {FACTS!r} | {{'config': tree, 'settings': settings.read(tree, {PARQUET!r})}}\n"
        "assert not list(d.judge(facts, d.Target('python', None), (0, 9)))\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"omegaconf", "hydra", "ray", "verl"} & set(loaded)


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    source = ast.parse((ROOT / "adapters/verl_doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(source) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
