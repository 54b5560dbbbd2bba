"""SkyRL's side of `migrate`: what a config trains, and a config for what is to be trained."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.skyrl_loss.surface import (
    CHOOSES,
    DEFAULTS,
    Parsed,
    findings,
    parse,
    value_in,
    whose,
)
from composer_plugins.adapters.skyrl_loss.upstream import release_of
from composer_plugins.config import at
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.skyrl import NODE, SKYRL, Key
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import Kind
from composer_plugins.objective.by_table import ByTable, nested
from composer_plugins.objective.keys import check_flag, check_tables, not_carried
from composer_plugins.objective.objective import (
    KL,
    Behaviour,
    Objective,
    as_mis,
    channels_of,
    named,
    named_policy,
    without_policy,
)

FLAGS = (Key.USE_KL, Key.KL_IN_REWARD, Key.USE_ENTROPY, Key.USE_TIS, Key.STEP_WISE, Key.ASYNC)
TABLES = ("trainer", "generator", skyrl.ALGORITHM, skyrl.CORRECTION, NODE)
LEVELS, METRICS = ("token", "sequence"), ("product", "geometric")


class Configs(ByTable):
    """SkyRL's configs, from the root: a YAML, or the dotted options of its command line."""

    def __init__(self) -> None:
        super().__init__(SKYRL)
        self.KNOWN |= {NODE, Key.KL_CONTROL}

    def release(self, version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
        """The release whose options are read and written."""
        return f"SkyRL {release_of(version)}"

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What SkyRL trains with this config, and what does not hold of it."""
        check_tables(table, *TABLES)
        for key in FLAGS:
            if at(table, key) is not None:
                check_flag(key, at(table, key))
        release, wrong, parsed = release_of(version), Findings(), dict[Kind, Parsed | None]()
        for kind in CHOOSES:
            with wrong.collected():
                parsed[kind] = parse(table, kind, release)
        enforce(wrong)
        objective = self._what_is_trained(table, parsed)
        return objective, [*findings(table, objective, parsed, release)]

    def _what_is_trained(self, table: Mapping[str, Any], parsed: Mapping[Kind, Parsed | None]) -> Objective:
        def value(key: str) -> Any:
            return value_in(table, key)

        remarks = list(not_carried(table, SKYRL.not_carried))
        policy, advantage = parsed["policy"], parsed["advantage"]
        reduction = value(Key.REDUCTION)
        if reduction not in (skyrl.LEGACY, *SKYRL.denominators):
            raise unknown(
                Key.REDUCTION, str(reduction), (skyrl.LEGACY, *SKYRL.denominators), noun="reduction"
            )
        mode, length = SKYRL.denominators.get(reduction, "token-mean"), None
        if reduction == skyrl.LEGACY:
            remarks.append(f"{Key.REDUCTION} = {reduction!r}: {skyrl.LEGACY_REMARK}")
        if reduction == skyrl.NORM:
            length = self.converted(SKYRL.option(Key.LENGTH), table)
            mode, length = ("seq-mean-token-sum", None) if length == 1 else (mode, length)
        kl = None
        if weight := self.converted(SKYRL.option(Key.KL_COEF), table):
            in_loss, in_reward = value(Key.USE_KL), value(Key.KL_IN_REWARD)
            estimator = self.converted(SKYRL.option(Key.KL_TYPE), table)
            kl = KL(estimator, weight, "loss" if in_loss else "reward") if in_loss or in_reward else None
            if in_reward and value(Key.KL_CONTROL) not in (None, "fixed"):
                remarks.append(f"{Key.KL_CONTROL} = {value(Key.KL_CONTROL)!r}")
        correction, more = correction_of(table)
        temperature = self.converted(SKYRL.option(Key.TEMPERATURE), table)
        fields: dict[str, Any] = {
            "advantage": advantage and advantage.choice,
            "group_size": self.converted(SKYRL.option(Key.GROUP_SIZE), table),
            "kl": kl,
            "correction": correction,
            "entropy": self.converted(SKYRL.option(Key.ENTROPY), table) if value(Key.USE_ENTROPY) else 0.0,
            "temperature": temperature or self.converted(SKYRL.option(Key.SAMPLED_AT), table),
            "denominators": {
                "KL": "seq-mean-token-mean",
                "entropy bonus": "the tokens of a micro-batch, then the mean over micro-batches",
                "policy_weight": "the policy loss",
            },
        }
        if advantage is None:
            remarks.append(f"{Key.ESTIMATOR} = {value(Key.ESTIMATOR)!r}, which is not in the catalogue")
        if policy is None:
            name = str(value(Key.POLICY))
            why = f"{name!r} trains on the likelihood alone, without advantages"
            if name != skyrl.LIKELIHOOD:
                why = f"{Key.POLICY} = {name!r} is not SkyRL's own, and what it computes is not known here"
            return without_policy(why, remarks=(*remarks, *more), **fields)
        name = str(value(Key.POLICY))
        if policy.own is not None and name in skyrl.FOLDED:
            remarks.append(f"{Key.POLICY} = {name!r}: {skyrl.FOLDED[name]}")
        old, rollout = whose(table, policy)
        fields |= {"old": old, "rollout": rollout, "channels": channels_of(policy.config)}
        return Objective(policy=policy.choice, mode=mode, length=length, remarks=(*remarks, *more), **fields)

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """A config for this objective: SkyRL's own loss where it is the same, and ours otherwise."""
        release, options = release_of(version), dict[str, Any]()
        node: dict[str, Any] = {
            name: x for name, x in objective.channels.items() if name not in skyrl.NOT_AVAILABLE
        }
        node = {name: x for name, x in node.items() if not name.startswith(("hint_", "replay_", "teacher_"))}
        own = None if objective.no_policy else own_loss("policy", objective.policy, release)
        if own is not None and not node and whose_of(own) == (objective.old, objective.rollout):
            options |= own
        else:
            options[Key.POLICY] = "composer"
            node |= named_policy(objective)
        if objective.advantage is not None:
            theirs = own_loss("advantage", objective.advantage, release)
            options |= theirs or {Key.ESTIMATOR: "composer"}
            node |= {} if theirs else named("advantage", objective.advantage)
        if node:
            options |= {NODE: node, Key.ENTRYPOINT: skyrl.ENTRYPOINT}
        of_modes = {mode: name for name, mode in SKYRL.denominators.items()}
        options[Key.REDUCTION] = of_modes.get(objective.mode, DEFAULTS[Key.REDUCTION])
        if objective.mode == "seq-mean-token-sum":
            options |= {Key.REDUCTION: skyrl.NORM, Key.LENGTH: 1}
        elif objective.length is not None:
            options[Key.LENGTH] = int(objective.length)
        options |= _kl_options(objective.kl)
        if objective.entropy:
            options |= {Key.USE_ENTROPY: True, Key.ENTROPY: objective.entropy}
        options |= correction_options(objective.correction)
        if objective.temperature != 1.0:
            options[Key.SAMPLED_AT] = objective.temperature
        if objective.group_size is not None:
            options[Key.GROUP_SIZE] = objective.group_size
        return nested(
            {key: x for key, x in options.items() if key == Key.POLICY or x != DEFAULTS.get(key, ())}
        )

    def render(self, table: Mapping[str, Any]) -> str:
        """The config as a command: SkyRL takes options, and no file."""
        words = [shlex.quote(f"{key}={_word(x)}") for key, x in _leaves(table)]
        return " \\\n  ".join(["python -m skyrl.train.entrypoints.main_base", *words]) + "\n"


def whose_of(own: Mapping[str, Any]) -> tuple[Behaviour | None, Behaviour | None]:
    """What `whose` says of a config with these options."""
    table = nested(own)
    parsed = parse(table, "policy", SKYRL.release)
    assert parsed is not None
    return whose(table, parsed)


def own_loss(kind: Kind, wanted: Choice, release: str) -> dict[str, Any] | None:
    """SkyRL's options for its own loss, where it has one that is the same; None otherwise."""
    for own in SKYRL.losses:
        if own.kind != kind or own.row.partition("@")[0] != wanted.loss.name or wanted.is_third_party:
            continue
        if release not in SKYRL.releases_of(own) or str(own.options.get(CHOOSES[kind])) in skyrl.FOLDED:
            continue
        start, options = choose(kind, own.row, own.params), dict[str, Any](own.options)
        values = {name: start.value(name) for name in start.loss.parameters}
        for option in own.own:
            sets = next((one for one in option.sets if one.is_of(wanted.loss)), None)
            if sets is not None and (ours := wanted.value(sets.parameters[0])) is not None:
                try:
                    theirs = sets.conversion.theirs(ours)
                except KeyError:
                    continue
                values |= option.values(wanted.loss, theirs)
                options |= {option.key: theirs} if theirs != option.default else {}
        if all(values[name] == wanted.value(name) for name in values):
            return options
    return None


def _kl_options(kl: KL | None) -> dict[str, Any]:
    if kl is None:
        return {Key.USE_KL: False}
    name = kl.estimator.loss.name
    kind = name if name in skyrl.KL_ESTIMATORS else name.partition("_")[0]
    options = {Key.KL_COEF: kl.weight, Key.KL_TYPE: kind if kind in skyrl.KL_ESTIMATORS else "k3"}
    return options | ({} if kl.place == "loss" else {Key.USE_KL: False, Key.KL_IN_REWARD: True})


def correction_of(table: Mapping[str, Any]) -> tuple[Choice | None, list[str]]:
    """SkyRL's off_policy_correction as a correction of the catalogue; and what of it is not one."""

    def value(key: str) -> Any:
        return value_in(table, key)

    level, metric, remarks = value(Key.TIS), value(Key.SEQUENCE_MASK), list[str]()
    caps = {"token": value(Key.TOKEN_CAP), "sequence": value(Key.SEQUENCE_CAP)}
    if value(Key.USE_TIS):
        level, caps["token"] = "token", value(Key.FORMER_CAP)
        if caps["token"] <= 0:
            problem = f"it is {caps['token']:g}, and SkyRL multiplies the loss by at most that number"
            raise ConfigError(Key.FORMER_CAP, problem, f"set {Key.TIS}=token and {Key.TOKEN_CAP}")
    if level is not None and level not in LEVELS:
        raise unknown(Key.TIS, str(level), LEVELS, noun="level")
    if metric is not None and metric not in METRICS:
        raise unknown(Key.SEQUENCE_MASK, str(metric), METRICS, noun="metric")
    bands = {"token": _band(value, Key.TOKEN_MASK), "sequence": None}
    bands["sequence"] = _band(value, Key.PRODUCT_MASK) if metric == "product" else None
    remarks += [f"{key} = {value(key)!r}" for key in Key.OUTLIERS if value(key) is not None]
    if metric == "geometric":
        remarks.append(f"{Key.SEQUENCE_MASK} = {metric!r}, which drops sequences by their mean ratio")
    for other, band in bands.items():
        if band is not None and (other != level or caps[other] < band[1]):
            key = Key.SEQUENCE_MASK if other == "sequence" else Key.TOKEN_MASK[1]
            remarks.append(f"{key} = {value(key)!r}, which drops by the ratio, beside the weights")
            bands[other] = None
    if level is None:
        return None, remarks
    if (band := bands[level]) is not None:
        params = {"low": band[0], "high": band[1], "log_ratio_clamp": skyrl.LOG_CLAMP, "level": level}
        return choose("correction", "mis", params), remarks
    params = {"cap": caps[level], "level": level, "log_ratio_clamp": skyrl.LOG_CLAMP}
    return choose("correction", "tis", params, option=Key.TIS), remarks


def _band(value: Any, keys: tuple[str, str]) -> tuple[float, float] | None:
    low, high = map(value, keys)
    return None if low is None or high is None else (low, high)


def correction_options(correction: Choice | None) -> dict[str, Any]:
    """The options of off_policy_correction for these weights; none where SkyRL has no such weight."""
    if correction is None:
        return {}
    correction = as_mis(correction)
    level, low, high = (correction.value(name) for name in ("level", "low", "high"))
    if level not in LEVELS or correction.value("normalise"):
        return {}
    cap_key = Key.TOKEN_CAP if level == "token" else Key.SEQUENCE_CAP
    if correction.loss.name == "tis":
        return {Key.TIS: level, cap_key: correction.value("cap")} if not correction.value("floor") else {}
    options = {Key.TIS: level, cap_key: high}
    band = {"token": Key.TOKEN_MASK, "sequence": Key.PRODUCT_MASK}[level]
    options |= dict(zip(band, (low or 0.0, high), strict=True))
    return options | ({Key.SEQUENCE_MASK: "product"} if level == "sequence" else {})


def check(table: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is wrong in a whole config, and warn of the rest."""
    written = {**table, "trainer": {**table["trainer"], "override_entrypoint": skyrl.ENTRYPOINT}}
    enforce(_CONFIGS.read(written)[1])


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


_CONFIGS = Configs()
KNOWN, NO_BEARING = _CONFIGS.KNOWN, _CONFIGS.NO_BEARING
read, write, render = _CONFIGS.read, _CONFIGS.write, _CONFIGS.render
unread, not_known, release = _CONFIGS.unread, _CONFIGS.not_known, _CONFIGS.release
