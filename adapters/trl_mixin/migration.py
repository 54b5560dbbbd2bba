"""TRL's side of `composer-plugins migrate`: a GRPOConfig as an Objective, and an Objective as one."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import yaml

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.options import OWN, TRL_LOSS, ComposerGRPOConfig, unknown_option
from composer_plugins.errors import ComposerWarning, ConfigError, Finding, near, unknown
from composer_plugins.frameworks.contract import NOTHING, SAMPLING
from composer_plugins.frameworks.trl import (
    LOSS_OPTIONS,
    LOSS_TYPES,
    MODES,
    OF_MODES,
    SEQUENCE_LEVEL,
    TRL,
    VLLM_BOUNDS,
    VLLM_WEIGHTS,
)
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.objective.asking import is_of, named
from composer_plugins.objective.keys import (
    COUNT,
    NUMBER,
    POSITIVE,
    WEIGHT,
    check_flag,
    not_carried,
    not_looked_at,
)
from composer_plugins.objective.objective import (
    KL,
    NORM,
    Objective,
    as_mis,
    behaviours,
    channels_of,
    named_policy,
)

# Options that decide how the batch is made and cut, and no term of the loss.
BATCH = {"gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_iterations"}
BATCH |= {"per_device_train_batch_size", "per_device_eval_batch_size", "num_generations_eval"}
BATCH |= {"pad_to_multiple_of", "chat_template_kwargs", "gradient_checkpointing_kwargs", "log_multimodal"}
BATCH |= {"cast_lm_head_to_fp32"}
OF_ITS_LOSSES = {name for name, one in LOSS_OPTIONS.items() if one.acts_by_parameters}
LEVELS = ("token", "sequence")
SCALES = ("group", "batch", "none")
READ = {"beta", "use_bias_correction_kl", "entropy_coef", "temperature", "scale_rewards", "num_generations"}
READ |= {"loss_type", "importance_sampling_level", "max_completion_length", "use_vllm"}
READ |= {name for name in LOSS_OPTIONS if name.startswith("vllm_importance_sampling_")}
# Options that are not in LOSS_OPTIONS and still change the loss.
BESIDE = {"sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "vllm_importance_sampling_cap"}
BESIDE |= {"remove_unused_columns"}
KNOWN = {field.name for field in fields(ComposerGRPOConfig)}
NAMES = ({*OWN} | set(LOSS_OPTIONS) | BESIDE | {"policy", "loss_type"}) - BATCH  # the options of the loss
BOOLEANS = {"use_vllm", "vllm_importance_sampling_correction", "use_bias_correction_kl", "sync_ref_model"}
NUMBERS = {
    "beta": WEIGHT,
    "entropy_coef": NUMBER,
    "temperature": POSITIVE,
    "num_generations": COUNT,
    "max_completion_length": COUNT,
} | {f"vllm_importance_sampling_{bound}": NUMBER for bound in ("clip_min", "clip_max", "cap")}
ALL_ROWS = "all completions of the batch"


def read(table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
    """What TRL trains with these options of a ComposerGRPOConfig, and what does not hold of them."""
    options, policy, found = _config(table)
    mode = options.resolved.mode
    old, rollout = behaviours(policy, "trainer", "rollout engine")
    scale = {True: "group", False: "none"}.get(options.scale_rewards, options.scale_rewards)
    if scale not in SCALES:
        raise unknown("scale_rewards", str(scale), SCALES)
    kl = None
    if options.beta:
        name, level = "k3@trl", {}
        if options.use_bias_correction_kl:
            by_sequence = policy.loss.name in SEQUENCE_LEVEL
            name, level = "k3_corrected@trl", {"level": "sequence" if by_sequence else "token"}
        kl = KL(choose("kl", name, level), options.beta)
    objective = Objective(
        policy=policy,
        mode=mode,
        length=options.max_completion_length if mode == NORM else None,
        old=old,
        rollout=rollout,
        advantage=choose("advantage", "grpo@trl", {"scale": scale}),
        group_size=options.num_generations,
        kl=kl,
        correction=_correction(options),
        entropy=options.entropy_coef,
        temperature=options.temperature,
        replay_temperature=options.replay_temperature,
        channels=channels_of(options.resolved.composer),
        denominators={
            "KL": mode,
            "entropy bonus": "the tokens of one micro-batch",
            "hint_weight": ALL_ROWS,
            "replay_weight": ALL_ROWS,
            "policy_weight": "the policy loss, the KL and the entropy bonus",
        },
        remarks=(*_remarks(options), *not_carried(table, TRL.not_carried)),
    )
    return objective, found


def unread(table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """The keys of a config that are not looked at."""
    return not_looked_at(table, NAMES | BATCH | TRL.not_carried.keys())


def release(version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
    """The release whose options are read and written."""
    return f"TRL {upstream.VERSION}'s GRPOConfig, which is installed here"


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """Options of ComposerGRPOConfig for this objective, as far as TRL can run it."""
    policy = objective.policy
    table = named_policy(objective)
    if objective.mode in OF_MODES:
        table["loss_type"] = OF_MODES[objective.mode]
    if objective.length is not None:
        table["max_completion_length"] = int(objective.length)
    if objective.advantage is not None and objective.advantage.loss.name in ("grpo", "dr_grpo"):
        table["scale_rewards"] = objective.advantage.value("scale") or "none"
    if objective.group_size is not None and objective.group_size > 1:  # TRL has no groups of one
        table["num_generations"] = objective.group_size
    if objective.kl is not None and objective.kl.place == "loss":
        name = objective.kl.estimator.loss.name
        if name in ("k3", "k3_corrected"):
            table |= {"beta": objective.kl.weight, "use_bias_correction_kl": name == "k3_corrected"}
    if objective.correction is not None:
        table |= _vllm_options(objective.correction, policy)
    elif objective.has_terms:  # with use_vllm=True, TRL's default is a correction
        table["vllm_importance_sampling_correction"] = False
    if objective.entropy:
        table["entropy_coef"] = objective.entropy
    if objective.temperature != 1.0:
        table["temperature"] = objective.temperature
    if objective.channels.get("replay_weight") and objective.replay_temperature not in (None, 1.0):
        table["replay_temperature"] = objective.replay_temperature
    return table | {name: value for name, value in objective.channels.items() if name in KNOWN}


def render(table: Mapping[str, Any]) -> str:
    """The options as the YAML that ComposerParser reads."""
    return yaml.safe_dump(dict(table), sort_keys=False)


def _config(table: Mapping[str, Any]) -> tuple[ComposerGRPOConfig, Choice, list[Finding]]:
    """The options of the loss, the policy loss, where it is TRL's own too, and what does not hold."""
    loss = named(table, "policy") if "policy" in table else None
    for name in [name for name in table if name not in KNOWN]:
        of_loss = loss is not None and is_of(loss, name)
        is_ours = name.startswith(("hint_", "replay_", "policy_")) or near(name, OWN, completes=False)
        if is_ours or of_loss or name in TRL.unavailable:
            raise unknown_option(name, OWN, table)
    values = {name: value for name, value in table.items() if name in NAMES}
    for name in BOOLEANS & values.keys():
        check_flag(name, values[name])
    for name, number in NUMBERS.items():
        default = upstream.DEFAULTS.get(name)
        if (value := values.get(name, default)) is not None or name != "max_completion_length":
            number.check(name, value, default)  # without that length TRL trains
    own = _own_loss(values) if values.get("policy", TRL_LOSS) == TRL_LOSS else {}
    options = _made(values)
    sampled = {name: table[name] for name in SAMPLING.keys() & table.keys()}
    found = list((_made(values | sampled) if sampled else options).findings())
    if own:
        row = choose("policy", own["policy"]).loss
        # TRL's own loss does not read what our loss has no parameter for.
        given = {name: x for name, x in upstream.moved(options).items() if LOSS_OPTIONS[name].values(row, x)}
        own["policy_params"] = TRL.parameters(row, given)
        options = _made({name: x for name, x in values.items() if name not in OF_ITS_LOSSES} | own)
    policy = options.resolved.policy
    assert policy is not None
    return options, policy, found


def _made(values: Mapping[str, Any]) -> ComposerGRPOConfig:
    """A config of these options, with a batch such that they alone are checked."""
    size = values.get("num_generations", upstream.DEFAULTS["num_generations"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about TRL's own defaults
        warnings.simplefilter("ignore", ComposerWarning)  # `read` returns them
        return ComposerGRPOConfig(
            output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=size, **values
        )


def _own_loss(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which our policy loss is the one that TRL's own options name."""
    kind = values.get("loss_type") or upstream.DEFAULTS["loss_type"]
    level = values.get("importance_sampling_level", "token")
    if level not in LEVELS:
        raise unknown("importance_sampling_level", str(level), LEVELS, noun="level")
    name = TRL.row_of(loss_type=kind, importance_sampling_level=level)
    if name is None:
        problem = f"with importance_sampling_level={level!r}, {kind!r} is not a loss of the catalogue"
        raise ConfigError("loss_type", problem, f"set one of {', '.join(LOSS_TYPES)}")
    return {"policy": name, "loss_type": kind if kind in MODES else None}


def _correction(options: ComposerGRPOConfig) -> Choice | None:
    if not upstream.corrects_rollouts(options):
        return None
    mode = str(options.vllm_importance_sampling_mode)
    if mode not in VLLM_WEIGHTS:
        raise unknown("vllm_importance_sampling_mode", mode, VLLM_WEIGHTS, noun="mode")
    name, level = VLLM_WEIGHTS[mode]
    low, high = VLLM_BOUNDS[name]
    given = {low: options.vllm_importance_sampling_clip_min, high: options.vllm_importance_sampling_clip_max}
    bounds = {bound: value for bound, value in given.items() if value is not None}
    return choose("correction", name, bounds | {"level": level})


def _vllm_options(correction: Choice, policy: Choice) -> dict[str, Any]:
    """The options of TRL for a correction; none where TRL has no such weight, or not with this policy."""
    correction = as_mis(correction)
    kind = (correction.loss.name, correction.value("level"))
    modes = [mode for mode, one in VLLM_WEIGHTS.items() if one == kind]
    by_token = "log_weights" in policy.loss.optional
    if "rollout_logprobs" in policy.loss.needs or (by_token and kind[1] != "token"):
        modes = []
    if not modes:
        return {"vllm_importance_sampling_correction": False}
    low, high = VLLM_BOUNDS[kind[0]]
    return {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": modes[0],
        "vllm_importance_sampling_clip_min": correction.value(low),
        "vllm_importance_sampling_clip_max": correction.value(high),
    }


def _remarks(options: ComposerGRPOConfig) -> Iterator[str]:
    """What TRL's loss reads, and no field of Objective has."""
    for name, value in upstream.moved(options).items():
        changes_nothing = name == "reward_weights" and isinstance(value, list) and set(value) == {1}
        if not (changes_nothing or LOSS_OPTIONS[name].sets or name in READ | BATCH):
            yield f"{name} = {value!r}"
    if options.beta and options.sync_ref_model:
        every = options.ref_model_sync_steps
        yield f"sync_ref_model = True: the KL's reference follows the policy every {every} steps"
    if options.resolved.composer.hint_weight and options.hint_source != "column":
        yield f"hint_source = {options.hint_source!r}: the others take hints from the data set alone"
