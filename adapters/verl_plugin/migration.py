"""verl's side of `composer-plugins migrate`: main_ppo's config as an Objective, and an Objective as one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from composer_plugins.adapters.verl_plugin import options as verl_options
from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.options import NODE, TARGET, TRAINER, WORKER_NODE, LossKind
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, findings
from composer_plugins.config import at
from composer_plugins.errors import ConfigError, Finding, error_of, unknown
from composer_plugins.frameworks import verl
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind
from composer_plugins.objective import keys
from composer_plugins.objective.by_table import nested
from composer_plugins.objective.objective import (
    KL,
    NORM,
    Behaviour,
    Objective,
    as_mis,
    behaviours,
    channels_of,
    named,
    named_policy,
    set_params,
)
from composer_plugins.objective.registered import is_ours, loss_in

# The rows that are verl's vanilla: a config is named by the one that has its mode and its clips.
VANILLA = ("grpo@verl", "dapo@verl", "dr_grpo@verl")
TABLES = ["algorithm", "actor_rollout_ref", Key.ACTOR, Key.ROLLOUT, "trainer", "trainer.v1"]
TABLES += [Key.POLICY_LOSS, Key.CORRECTION, NODE, Key.KL_CONTROL]
KNOWN = {"algorithm", "actor_rollout_ref", "defaults"}  # tables at the top of a file, with what is read
LOG_CLAMP = 20.0  # of verl's weights, in nats
NO_BOUND = 1e-9  # a lower bound that no weight reaches because of the clamp; verl does not take 0
NUMBERS = {
    Key.KL_COEF: keys.WEIGHT,
    Key.ENTROPY: keys.NUMBER,
    Key.REWARD_KL_COEF: keys.WEIGHT,
    Key.TEMPERATURE: keys.POSITIVE,
    Key.GROUP_SIZE: keys.COUNT,
    Key.SCALE_FACTOR: keys.COUNT,
}
OUR_DEFAULTS = ("ppo_trainer", "_self_")  # the entries of a file's `defaults` that are known
# The keys that are read: verl's own options of its losses and estimators, and ours.
_KEYS = {*verl.DEFAULTS, Key.GROUP_SIZE, Key.TEMPERATURE, Key.ROLLOUT_LOGPROBS, "defaults", NODE, WORKER_NODE}
_KEYS |= {Key.LOSS_TARGET, Key.CRITIC, "hydra"}
READ = {key for key in _KEYS if not any(one.startswith(f"{key}.") for one in _KEYS)}  # without their tables
# By row, the first of verl's names; k1, k2 and k3 stand for the corrected ones, which verl does not have.
KL_NAMES = {row.partition("@")[0]: name for name, row in reversed(verl.KL_ESTIMATORS.items())}
KL_NAMES |= {f"{name}_corrected": KL_NAMES[name] for name in ("k1", "k2", "k3")}


def read(table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
    """What verl trains with this config, and the errors that the doctor finds in a config with our losses."""

    def value(key: str) -> Any:
        found = at(table, key)
        if found is None:
            return verl.DEFAULTS.get(key)
        _check(key, found)
        return found

    keys.check_tables(table, *TABLES)
    remarks = list(keys.not_carried(table, VERL.not_carried))
    others = [one for one in table.get("defaults") or () if one not in OUR_DEFAULTS]
    remarks += [f"defaults: {one!r}, which was not read" for one in others]
    set_mode = str(value(Key.AGG_MODE))
    if set_mode not in verl.MODES:
        raise unknown(Key.AGG_MODE, set_mode, verl.MODES, noun="mode")
    node = at(table, NODE) or {}
    theirs = at(table, WORKER_NODE)  # an interpolation of the same table, or one of the workers' own
    of_workers = theirs if isinstance(theirs, Mapping) else node
    policy = _choice(table, of_workers, "policy", str(value(Key.LOSS_MODE)), remarks)
    assert policy is not None
    if value(Key.LOSS_MODE) == "vanilla":
        rows = (choose("policy", name) for name in VANILLA)
        of_mode = [replace(one, params=policy.params) for one in rows if one.mode == set_mode]
        policy = min(of_mode or [policy], key=lambda one: len({*set_params(one)} - {"dual_clip"}))
    mode = verl.FORCED_MODES.get(policy.name, set_mode)
    given: Behaviour = "rollout engine" if value(Key.BYPASS) else "trainer"
    old, rollout = behaviours(policy, given, given)  # verl has one tensor for both
    kl = None
    if value(Key.USE_KL_LOSS) and value(Key.KL_COEF):
        kl = KL(_estimator(value(Key.KL_TYPE)), value(Key.KL_COEF))
    elif value(Key.KL_IN_REWARD) and (weight := value(Key.REWARD_KL_COEF)):
        kl = KL(_estimator(value(Key.REWARD_KL_TYPE)), weight, "reward")
    if kl is not None and kl.place == "loss" and value(Key.KL_IN_REWARD):
        remarks.append(f"{Key.KL_IN_REWARD} = True, in addition to the KL in the loss")
    if kl is not None and (adapter := next(filter(None, (at(table, one) for one in Key.ADAPTERS)), None)):
        remarks.append(f"the adapter {adapter!r}: the reference of the KL is the model without it")
    kept = value(Key.ROLLOUT_LOGPROBS) is not False
    correction = _correction(value) if kept else None
    if value(Key.CORRECTED) and correction is None:
        inert = f"where {Key.BYPASS} is True or {Key.ROLLOUT_LOGPROBS} is False"
        remarks.append(f"{Key.CORRECTED} = {value(Key.CORRECTED)!r}, which has no effect {inert}")
    if correction is not None and value(Key.LOSS_MODE) == verl.MEAN_OVER_ROWS:
        remarks.append(f"{value(Key.LOSS_MODE)} takes the geometric mean of a row's correction weights")
    no_policy = ""
    if at(table, Key.DISTILLATION) and at(table, Key.TASK_REWARDS) is False:  # verl's default is True
        no_policy = f"verl sets the policy loss to 0 where {Key.DISTILLATION} is True and "
        no_policy += f"{Key.TASK_REWARDS} is not"
    objective = Objective(
        policy=policy,
        mode=mode,
        length=value(Key.SCALE_FACTOR) if mode == NORM else None,
        old=old,
        rollout=rollout,
        advantage=_choice(table, node, "advantage", str(value(Key.ESTIMATOR)), remarks),
        group_size=value(Key.GROUP_SIZE) or 1,
        kl=kl,
        correction=correction,
        entropy=value(Key.ENTROPY),
        temperature=value(Key.TEMPERATURE),
        replay_temperature=value(Key.TEMPERATURE),
        channels=channels_of(verl_options.required(node, "policy").config),
        denominators={
            "KL": set_mode,
            "entropy bonus": set_mode,
            "hint_weight": set_mode,
            "replay_weight": "the pairs of the step",
            "policy_weight": "the policy loss",
        },
        remarks=tuple(remarks),
        no_policy=no_policy,
    )
    return objective, list(_errors(table))


def unread(table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """The keys of a config that are not looked at."""
    return keys.not_looked_at(table, READ | VERL.not_carried.keys())


def release(version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
    """The release whose options are read and written."""
    return f"verl {VERL.release}"


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """A config of main_ppo for this objective, as far as verl can run it."""
    advantage, kl, mode = objective.advantage, objective.kl, objective.mode
    node = (named("advantage", advantage) if advantage else {}) | named_policy(objective)
    node |= {name: x for name, x in objective.channels.items() if name not in VERL.unavailable}
    worker = {"_target_": TARGET, "loss_mode": "composer", "composer": f"${{{NODE}}}"}
    options: dict[str, Any] = {NODE: node, Key.POLICY_LOSS: worker}
    if advantage is not None:
        options |= {Key.ESTIMATOR: "composer", Key.CRITIC: False}
    has_others = kl or objective.entropy or objective.channels.get("hint_weight")
    if has_others and objective.policy.name in verl.FORCED_MODES:  # loss_agg_mode is the others' mode
        mode = objective.denominators.get("KL", mode)
    if mode in verl.MODES:
        options[Key.AGG_MODE] = mode
    if objective.length is not None:
        options[Key.SCALE_FACTOR] = int(objective.length)
    if kl is not None and (kind := KL_NAMES.get(kl.estimator.loss.name)) is not None:
        names = (Key.USE_KL_LOSS, Key.KL_COEF, Key.KL_TYPE)
        if kl.place == "reward":
            names = (Key.KL_IN_REWARD, Key.REWARD_KL_COEF, Key.REWARD_KL_TYPE)
        options |= dict(zip(names, (True, kl.weight, kind), strict=True))
    correction = _correction_options(objective.correction) if objective.correction else {}
    if "rollout engine" in (objective.old, objective.rollout):
        correction[Key.BYPASS] = True
    if correction:
        options |= {**correction, Key.ROLLOUT_LOGPROBS: True}
    asked = None if objective.no_policy or kl else verl_options.required(node, "policy")
    if asked is not None and verl_options.Channels(asked.config, asked.hint, asked.replay).uses_reference:
        options |= {Key.USE_KL_LOSS: True, Key.KL_COEF: 0.0}  # without it verl has no reference policy
    if objective.entropy:
        options[Key.ENTROPY] = objective.entropy
    if objective.temperature != 1.0:
        options[Key.TEMPERATURE] = objective.temperature
    if objective.group_size is not None:
        options[Key.GROUP_SIZE] = objective.group_size
    if any(objective.channels.get(f"{channel}_weight") for channel in verl_options.CHANNELS):
        options[Key.TRAINER_MODE] = TRAINER
    return nested(options)


def render(table: Mapping[str, Any]) -> str:
    """The config as the YAML of `main_ppo --config-dir . --config-name NAME`."""
    head = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    return yaml.safe_dump(head | dict(table), sort_keys=False)


def _check(key: str, found: Any) -> None:
    """Raise ConfigError for a value that verl would not take as it is written."""
    if isinstance(found, str) and "${" in found:
        problem = f"it is {found!r}, an interpolation, which is not resolved here"
        raise ConfigError(key, problem, "write the value")
    if isinstance(verl.DEFAULTS.get(key), bool):
        keys.check_flag(key, found)
    if key in NUMBERS:
        NUMBERS[key].check(key, found, REQUIRED)


def _errors(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the errors that the doctor finds in a config that we wrote, over verl 0.9's defaults."""
    if not is_ours(str(at(table, Key.LOSS_MODE))):
        return
    trainer = {"use_v1": True, "v1": {"trainer_mode": upstream.DEFAULT_TRAINER}}
    tree = {**table, "trainer": trainer | (at(table, "trainer") or {})}
    if isinstance(at(table, WORKER_NODE), str):  # an interpolation, which reads our table
        actor = at(table, Key.ACTOR)
        actor = actor | {"policy_loss": actor["policy_loss"] | {"composer": at(table, NODE)}}
        tree["actor_rollout_ref"] = table["actor_rollout_ref"] | {"actor": actor}
    for finding in findings(Run(tree), dict.fromkeys(upstream.REGISTRIES, ())):
        if finding.severity == "error":
            yield finding


def _choice(
    table: Mapping[str, Any], node: Mapping[str, Any], kind: LossKind, name: str, remarks: list[str]
) -> Choice | None:
    """The loss or the estimator that verl calls, with verl's own options among its parameters.

    None for an estimator that the catalogue does not have; a remark then says which.
    """
    given = upstream.moved(kind, at(table, VERL.tables[kind]) or {})
    if kind == "policy" and (nameless := [*verl_options.unnamed(name, node)]):
        raise error_of(nameless)
    if is_ours(name):
        return verl_options.required(node, kind, loss_in(name), given).choice
    row = VERL.row_of(**{verl.CHOOSES[kind]: name})
    loss = of_kind(losses(), kind)[row.partition("@")[0]] if row else None
    if kind == "advantage" and (loss is None or not VERL.runs(loss)):
        why = "is not in the catalogue" if loss is None else "needs more than a group's rewards"
        is_bare = at(table, Key.ESTIMATOR) is None and is_ours(str(at(table, Key.LOSS_MODE)))
        remarks += [] if is_bare else [f"{Key.ESTIMATOR} = {name!r}, which {why}"]
        return None
    if row is None or loss is None:
        raise ConfigError(Key.LOSS_MODE, f"{name!r} is not a loss of the catalogue", "name another loss_mode")
    return choose(kind, row, VERL.parameters(loss, given), option=kind)


def _estimator(kind: Any) -> Choice:
    return choose("kl", verl.KL_ESTIMATORS.get(str(kind), f"{kind}@verl"), option="kl_loss_type")


def _correction(value: Any) -> Choice | None:
    """rollout_is with its threshold: an upper bound, or "low_high", outside of which a weight is 0."""
    level = value(Key.CORRECTED)
    if not level or value(Key.BYPASS):
        return None
    if level not in ("token", "sequence"):
        raise unknown(Key.CORRECTED, str(level), ("token", "sequence"), noun="level")
    common = {"log_ratio_clamp": LOG_CLAMP} | ({"normalise": True} if value(Key.NORMALISE) else {})
    threshold = value(Key.THRESHOLD)
    try:
        *lower, upper = (float(bound) for bound in str(threshold).split("_", 1))
        if not lower:
            return choose("correction", "tis", {"cap": upper, "level": level} | common)
        bounds = {"high": upper} | ({"low": lower[0]} if lower[0] > NO_BOUND else {})
        if level == "token" and "low" in bounds:
            return choose("correction", "icepop", bounds | common)
        return choose("correction", "mis", bounds | {"level": level} | common)
    except ValueError as error:
        problem = f"it is {threshold!r}" + (f": {error.problem}" if isinstance(error, ConfigError) else "")
        raise ConfigError(Key.THRESHOLD, problem, "set a number, or a band as '0.5_5.0'") from None


def _correction_options(correction: Choice) -> dict[str, Any]:
    """The options of algorithm.rollout_correction; none where verl has no such weight."""
    correction = as_mis(correction)
    name, level = correction.loss.name, correction.value("level")
    if level not in ("token", "sequence"):
        return {}
    options = {Key.CORRECTED: level} | ({Key.NORMALISE: True} if correction.value("normalise") else {})
    if name == "tis":
        return options | {Key.THRESHOLD: correction.value("cap")}
    return options | {Key.THRESHOLD: f"{correction.value('low') or NO_BOUND}_{correction.value('high')}"}
