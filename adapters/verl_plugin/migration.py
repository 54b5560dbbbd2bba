"""verl's side of `composer-plugins migrate`: main_ppo's config as an Objective, and an Objective as one."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import yaml

from composer_plugins.adapters.verl_plugin import requirements, rules, upstream
from composer_plugins.adapters.verl_plugin.rules import NODE, TRAINER, is_ours, loss_in
from composer_plugins.adapters.verl_plugin.upstream import OPTION_TABLES, Key, at
from composer_plugins.catalogue import Choice, choose, of_kind
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.migration import KL, NORM, Behaviour, Objective, behaviours, channels_of, named
from composer_plugins.plugins import losses

# verl's own losses and estimators whose rows have another name than verl gives them.
POLICIES = {"vanilla": "grpo@verl", "gspo": "gspo_token@verl", "geo_mean": "gmpo@verl", "dro": "dro"}
ADVANTAGES = {
    "grpo_vectorized": "grpo@verl",
    "rloo_vectorized": "rloo",
    "grpo_passk": "pass_at_k@verl",
    "reinforce_plus_plus": "reinforce_pp@verl",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline@verl",
}
# verl's values where the file has none.
DEFAULTS: dict[str, Any] = {
    Key.ESTIMATOR: "gae",
    Key.LOSS_MODE: "vanilla",
    Key.AGG_MODE: upstream.DEFAULT_MODE,
    Key.KL_COEF: 0.001,
    f"{Key.ACTOR}.kl_loss_type": "low_var_kl",
    f"{Key.ACTOR}.entropy_coeff": 0.0,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{Key.ROLLOUT}.temperature": 1.0,
    f"{Key.CORRECTION}.rollout_is_threshold": 2.0,
}
BOOLEANS = (Key.USE_KL_LOSS, Key.KL_IN_REWARD, Key.BYPASS)
OWN_MODES = {upstream.MEAN_OVER_ROWS: "seq-mean-token-mean"}  # of a loss that does not read loss_agg_mode
OUR_DEFAULTS = ("ppo_trainer", "_self_")  # the entries of a file's `defaults` that are known
# What verl's losses read, and no field of Objective has: the key, and its values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    Key.DISTILLATION: (None, False),
    f"{Key.CORRECTION}.rollout_rs": (None, False),
    f"{Key.CORRECTION}.rollout_token_veto_threshold": (None,),
    "algorithm.kl_ctrl.type": (None, "fixed"),
    "algorithm.filter_groups.enable": (None, False),
    "algorithm.rollout_is": (None, False),  # before 0.6, as the next one
    f"{Key.ACTOR}.tis_imp_ratio_cap": (None, 0, -1),
}
KL_TYPES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1+": "k1_plus", "k2+": "k2"}
KL_TYPES |= {"k3+": "k3_plus", "low_var_kl+": "k3_plus"}
# By row, the first of verl's names; verl's k3 stands for the corrected one, which it does not have.
KL_NAMES = {row: kind for kind, row in reversed(KL_TYPES.items())} | {"k3_corrected": "low_var_kl"}


def read(table: Mapping[str, Any], version: str | None = None) -> Objective:
    """What verl trains with this config, which may leave out what is at verl's default."""

    def value(key: str) -> Any:
        found = at(table, key)
        if found is None:
            return DEFAULTS.get(key)
        _check(key, found)
        return found

    _check_tables(table)
    read_beside = {key: at(table, key) for key in NOT_CARRIED}
    remarks = [f"{key} = {x!r}" for key, x in read_beside.items() if x not in NOT_CARRIED[key]]
    others = [one for one in table.get("defaults", ()) if one not in OUR_DEFAULTS]
    remarks += [f"defaults: {one!r}, which was not read" for one in others]
    policy = _choice(table, "policy", str(value(Key.LOSS_MODE)), remarks)
    assert policy is not None
    set_mode = str(value(Key.AGG_MODE))
    if set_mode not in upstream.MODES:
        raise unknown(Key.AGG_MODE, set_mode, upstream.MODES, noun="mode")
    mode = OWN_MODES.get(str(value(Key.LOSS_MODE)), upstream.FORCED_MODES.get(policy.name, set_mode))
    given: Behaviour = "rollout engine" if value(Key.BYPASS) else "trainer"
    old, rollout = behaviours(policy, given, given)  # verl has one tensor for both
    kl = None
    if value(Key.USE_KL_LOSS) and value(Key.KL_COEF):
        kl = KL(_estimator(value(f"{Key.ACTOR}.kl_loss_type")), value(Key.KL_COEF))
    elif value(Key.KL_IN_REWARD):
        weight = value("algorithm.kl_ctrl.kl_coef")
        kl = KL(_estimator(value("algorithm.kl_penalty")), weight, "reward")
    if kl is not None and kl.place == "loss" and value(Key.KL_IN_REWARD):
        remarks.append(f"{Key.KL_IN_REWARD} = True, beside the KL in the loss")
    correction = _correction(value)
    if correction is not None and value(Key.LOSS_MODE) in OWN_MODES:
        remarks.append(f"{value(Key.LOSS_MODE)} takes the geometric mean of a row's correction weights")
    channels = channels_of(rules.parse(_node(table)))
    to_correct: tuple[str, ...] = ()
    if channels:
        try:
            rules.parse_channels(_node(table))
        except ConfigError as error:
            to_correct = (str(error.under(NODE)),)
    return Objective(
        policy=policy,
        mode=mode,
        length=value(Key.SCALE_FACTOR) if mode == NORM else None,
        old=old,
        rollout=rollout,
        advantage=_choice(table, "advantage", str(value(Key.ESTIMATOR)), remarks),
        group_size=value(f"{Key.ROLLOUT}.n"),
        kl=kl,
        correction=correction,
        entropy=value(f"{Key.ACTOR}.entropy_coeff"),
        temperature=value(f"{Key.ROLLOUT}.temperature"),
        replay_temperature=value(f"{Key.ROLLOUT}.temperature"),
        channels=channels,
        denominators={
            "KL": set_mode,
            "entropy bonus": set_mode,
            "hint_weight": set_mode,
            "replay_weight": "the pairs of the step",
            "policy_weight": "the policy loss",
        },
        remarks=tuple(remarks),
        to_correct=to_correct,
        unread=tuple(_unread(table)),
    )


def write(objective: Objective) -> dict[str, Any]:
    """A config of main_ppo for this objective, as far as verl can run it."""
    advantage = objective.advantage
    node = {} if advantage is None else named("advantage", advantage)
    node |= named("policy", objective.policy)
    node |= {name: x for name, x in objective.channels.items() if name not in rules.NOT_AVAILABLE}
    algorithm: dict[str, Any] = {} if advantage is None else {"adv_estimator": "composer"}
    algorithm["composer"] = node
    worker = {"_target_": requirements.TARGET, "loss_mode": "composer", "composer": f"${{{NODE}}}"}
    actor: dict[str, Any] = {"policy_loss": worker}
    rollout: dict[str, Any] = {}
    if objective.mode in upstream.MODES:
        actor["loss_agg_mode"] = objective.mode
    if objective.length is not None:
        actor["loss_scale_factor"] = int(objective.length)
    if objective.kl is not None:
        name = objective.kl.estimator.loss.name
        kind = KL_NAMES.get(name, name)
        if objective.kl.place == "loss":
            actor |= {"use_kl_loss": True, "kl_loss_coef": objective.kl.weight, "kl_loss_type": kind}
        else:
            algorithm |= {"use_kl_in_reward": True, "kl_penalty": kind}
            algorithm["kl_ctrl"] = {"kl_coef": objective.kl.weight}
    correction = _correction_options(objective.correction) if objective.correction else {}
    if "rollout engine" in (objective.old, objective.rollout):
        correction["bypass_mode"] = True
    if correction:
        algorithm["rollout_correction"] = correction
        rollout["calculate_log_probs"] = True
    if objective.kl is None and rules.channels_of(rules.parse(node)).uses_reference:
        actor |= {"use_kl_loss": True, "kl_loss_coef": 0.0}  # without it verl has no reference policy
    if objective.entropy:
        actor["entropy_coeff"] = objective.entropy
    if objective.temperature != 1.0:
        rollout["temperature"] = objective.temperature
    if objective.group_size is not None:
        rollout["n"] = objective.group_size
    written: dict[str, Any] = {"algorithm": algorithm, "actor_rollout_ref": {"actor": actor}}
    if rollout:
        written["actor_rollout_ref"]["rollout"] = rollout
    if advantage is not None:
        written["critic"] = {"enable": False}
    if any(objective.channels.get(f"{channel}_weight") for channel in rules.CHANNELS):
        written["trainer"] = {"v1": {"trainer_mode": TRAINER}}
    return written


def render(table: Mapping[str, Any]) -> str:
    """The config as the YAML of `main_ppo --config-dir . --config-name NAME`."""
    head = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    return yaml.safe_dump(head | dict(table), sort_keys=False)


def _check(key: str, found: Any) -> None:
    """Raise ConfigError for a value that verl would not take as it is written."""
    if isinstance(found, str) and "${" in found:
        problem = f"it is {found!r}, an interpolation, which is not resolved here"
        raise ConfigError(key, problem, "write the value")
    if key in BOOLEANS and not isinstance(found, bool):
        raise ConfigError(key, f"it is {found!r}", "set true or false")
    default = DEFAULTS.get(key, 1.0 if key in (Key.SCALE_FACTOR, f"{Key.ROLLOUT}.n") else None)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if isinstance(default, float) and not is_number and not key.endswith("rollout_is_threshold"):
        raise ConfigError(key, f"it is {found!r}", "set a number")


def _check_tables(table: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value in the place of a table, and for a dotted key."""
    for key in ("algorithm", "actor_rollout_ref", Key.ACTOR, Key.ROLLOUT, Key.POLICY_LOSS, Key.CORRECTION):
        if (found := at(table, key)) is not None and not isinstance(found, Mapping):
            raise ConfigError(key, f"it is {found!r}", "write a table of options")
    if dotted := [key for key in table if "." in str(key)]:
        raise ConfigError(dotted[0], "a file has no dotted keys", "write nested tables")


def _unread(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the tables that verl's losses read and that are not among the known options."""
    known: dict[str, set[str]] = {Key.ROLLOUT: {"n", "temperature", "calculate_log_probs"}}
    for kind, at_table in OPTION_TABLES.items():
        keys = {option.key for option in upstream.OPTIONS[kind]} | {*upstream.ACTING[kind]}
        known[at_table] = keys | {key.partition(".")[0] for key in keys}
    known["algorithm"] |= {"composer", *(key.removeprefix("algorithm.") for key in NOT_CARRIED)}
    inner = {key.removeprefix("policy_loss.") for key in known[Key.ACTOR]}
    known[Key.POLICY_LOSS] = inner | {"composer", "_target_", "loss_mode"}
    for path, names in known.items():
        yield from (f"{path}.{name}" for name in at(table, path) or () if name not in names)


def _node(table: Mapping[str, Any]) -> Mapping[str, Any]:
    node = at(table, NODE) or {}
    if not isinstance(node, Mapping):
        raise ConfigError(NODE, f"it is {node!r}", "write a table of options")
    return node


def _choice(
    table: Mapping[str, Any], kind: Literal["policy", "advantage"], name: str, remarks: list[str]
) -> Choice | None:
    """The loss or the estimator that verl calls, with verl's own options among its parameters.

    None for an estimator that the catalogue does not have; a remark then says which.
    """
    options = at(table, OPTION_TABLES[kind]) or {}
    given = upstream.given_options(kind, options)
    if is_ours(name):
        node = _node(table)
        return rules.parse_with_options(node, kind, loss_in(name), given)[1]
    row = (POLICIES if kind == "policy" else ADVANTAGES).get(name, f"{name}@verl")
    if row.partition("@")[0] not in of_kind(losses(), kind) or name in ("gae", "remax"):
        if kind == "advantage":
            remarks.append(f"{Key.ESTIMATOR} = {name!r}, which needs more than a group's rewards")
            return None
        raise ConfigError(Key.LOSS_MODE, f"{name!r} is not a loss of the catalogue", "name another loss_mode")
    # verl's own loss does not read an option that the row has no parameter for.
    read_by = rules.options_of(of_kind(losses(), kind)[row.partition("@")[0]], kind)
    given = {key: value for key, value in given.items() if key in read_by}
    node = rules.with_options({kind: row}, kind, None, given)
    return choose(losses(), kind, row, node.get(f"{kind}_params"), option=kind)


def _estimator(kind: str) -> Choice:
    return choose(losses(), "kl", f"{KL_TYPES.get(kind, kind)}@verl", option="kl_loss_type")


def _correction(value: Any) -> Choice | None:
    """rollout_is with its threshold: an upper bound, or "low_high", outside of which a weight is 0."""
    level = value(f"{Key.CORRECTION}.rollout_is")
    if not level or value(Key.BYPASS):
        return None
    low, is_band, high = str(value(f"{Key.CORRECTION}.rollout_is_threshold")).partition("_")
    common = {"log_ratio_clamp": 20.0}
    common |= {"normalise": True} if value(f"{Key.CORRECTION}.rollout_is_batch_normalize") else {}
    if not is_band:
        return choose(losses(), "correction", "tis", {"cap": float(low), "level": level} | common)
    bounds = {"high": float(high)} | ({"low": float(low)} if float(low) else {}) | common
    if level == "token":
        return choose(losses(), "correction", "icepop", bounds)
    return choose(losses(), "correction", "mis", bounds | {"level": level})


def _correction_options(correction: Choice) -> dict[str, Any]:
    """The options of algorithm.rollout_correction; none where verl has no such weight."""
    name, level = correction.loss.name, correction.value("level") or "token"
    if level not in ("token", "sequence"):
        return {}
    options = {"rollout_is": level}
    if correction.value("normalise"):
        options["rollout_is_batch_normalize"] = True
    if name == "tis":
        return options | {"rollout_is_threshold": correction.value("cap")}
    low, high = correction.value("low") or 0.0, correction.value("high")
    return options | {"rollout_is_threshold": f"{low:g}_{high:g}"}
