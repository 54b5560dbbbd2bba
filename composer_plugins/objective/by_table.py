"""The configs of a framework that has a table and no module of its own: read, written and examined."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from composer_plugins.config import at, unlikely
from composer_plugins.errors import ConfigError, did_you_mean, near, unknown
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import NOTHING, Framework, NamedLoss, Option
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.objective.keys import COUNT, NUMBER, POSITIVE, WEIGHT, not_carried, not_understood
from composer_plugins.objective.objective import KL, MISSING, Objective, behaviours
from composer_plugins.objective.options import given_options, parameters_set, without_effect
from composer_plugins.objective.rules import denominator_of_another

# By the field of the objective that an option sets: its range, or the kind of the row that it names.
NUMBERS = {"entropy": NUMBER, "temperature": POSITIVE, "group_size": COUNT, "length": COUNT}
NUMBERS |= {"kl.weight": WEIGHT}
KINDS = {"kl.estimator": "kl", "advantage": "advantage"}


class ByTable:
    """The configs of one framework, by its table (`frameworks.contract.Framework`)."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.choosers = tuple(dict.fromkeys(key for one in framework.losses for key in one.options))
        self.keys = {*self.choosers, *(one.key for one in framework.options)}
        self.NO_BEARING = framework.no_bearing
        self.KNOWN = {*self.keys, *framework.not_carried, *framework.no_bearing}

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What the framework trains with this config, and what does not hold of it.

        Raises ConfigError for a loss, a denominator or a value that the framework does not have, and for an
        option that its loss does not read.
        """
        policy, keys = self._policy(table)
        objective = self.objective_of(table, policy)
        found = [*without_effect(self.framework, "policy", self._given(table)), *unlikely(policy, keys)]
        if key := next((one.key for one in self._of_the_objective() if one.objective == "mode"), ""):
            found += denominator_of_another(policy, self.framework, objective.mode, key)
        return objective, found

    def unread(self, table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
        """The keys that are not understood."""
        return not_understood(table, self.KNOWN)

    def not_known(self, key: str, table: Mapping[str, Any]) -> Finding:
        """What the doctor says of a key that is not understood."""
        nearest = near(key, self.KNOWN, completes=False)
        remedy = did_you_mean(nearest) if nearest else "remove it, or find out what it does"
        problem = f"it is no option of {self.framework.title} that is known here"
        return Finding("warning", key, problem, remedy)

    def objective_of(self, table: Mapping[str, Any], policy: Choice) -> Objective:
        """What is trained with this policy loss, which the config names, and with its other options."""
        found = {one.objective: self._converted(one, table) for one in self._of_the_objective()}
        mode = found.get("mode") or next(iter(self.framework.denominators.values()), policy.mode)
        old, rollout = behaviours(policy, "trainer", "rollout engine")
        kl = None
        if found.get("kl.weight"):
            kl = KL(found.get("kl.estimator") or choose("kl", "k3"), found["kl.weight"])
        return Objective(
            policy=policy,
            mode=mode,
            length=found.get("length"),
            old=old,
            rollout=rollout,
            advantage=found.get("advantage"),
            group_size=found.get("group_size"),
            kl=kl,
            entropy=found.get("entropy") or 0.0,
            temperature=found.get("temperature") or 1.0,
            denominators={"KL": mode, "entropy bonus": mode},
            remarks=tuple(not_carried(table, self.framework.not_carried)),
        )

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """A config for this objective, as far as the framework runs it; ConfigError without such a loss."""
        if objective.no_policy:
            options: dict[str, Any] = {self.choosers[0]: MISSING}
        else:
            name = objective.policy.loss.name
            having = [one for one in self.framework.losses if one.row.partition("@")[0] == name]
            if not having:
                names = ", ".join(dict.fromkeys(one.row for one in self.framework.losses))
                problem = f"{self.framework.title} has no loss {name!r}"
                raise ConfigError("--to", problem, f"its losses are {names}")
            options = min((self._options(one, objective.policy) for one in having), key=len)
        kl = objective.kl if objective.kl and objective.kl.place == "loss" else None
        ours = {field: getattr(objective, field) for field in NUMBERS if field != "kl.weight"}
        ours |= {"mode": objective.mode, "advantage": objective.advantage and objective.advantage.name}
        ours |= {"kl.weight": kl.weight, "kl.estimator": kl.estimator.name} if kl else {}
        for option in self._of_the_objective():
            theirs = self._theirs(option, ours.get(option.objective))
            if theirs is not None and theirs != option.default:
                options[option.key] = theirs
        return nested(options)

    def render(self, table: Mapping[str, Any]) -> str:
        """The config as YAML."""
        return yaml.safe_dump(dict(table), sort_keys=False)

    def release(self, version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
        """The release whose options the table has."""
        return f"{self.framework.title} {self.framework.release}".strip()

    def _of_the_objective(self) -> list[Option]:
        return [one for one in self.framework.options if one.objective]

    def _given(self, table: Mapping[str, Any]) -> dict[str, Any]:
        def value_of(key: str, default: Any) -> Any:
            return default if (found := at(table, key)) is None else found

        return given_options(self.framework.options_of("policy"), value_of)

    def _policy(self, table: Mapping[str, Any]) -> tuple[Choice, dict[str, str]]:
        """The policy loss, and by parameter the option that sets it."""
        named = self.framework.losses[0]
        chosen = {key: at(table, key) for key in self.choosers}
        wanted = {key: named.options.get(key) if one is None else one for key, one in chosen.items()}
        row = self.framework.row_of(**{key: one for key, one in wanted.items() if one is not None})
        if row is None:
            key = next(key for key in self.choosers if chosen[key] is not None)
            known = {str(one.options.get(key)) for one in self.framework.losses}
            raise unknown(key, str(wanted[key]), known, noun="loss")
        choice = choose("policy", row)
        set_by = parameters_set(self.framework, choice.loss, {}, self._given(table), params_key="")
        values = {name: one.value for name, one in set_by.items()}
        keys = {name: one.key for name, one in set_by.items()}
        return replace(choice, params={**choice.params, **values}), keys

    def _converted(self, option: Option, table: Mapping[str, Any]) -> Any:
        """The value of the objective's field that an option sets."""
        value = option.default if (found := at(table, option.key)) is None else found
        if value is None:
            return None
        if option.objective in NUMBERS:
            NUMBERS[option.objective].check(option.key, value, option.default)
        known = self.framework.denominators if option.objective == "mode" else option.conversion.values
        if known and (not isinstance(value, Hashable) or value not in known):
            raise unknown(option.key, str(value), map(str, known), noun="value")
        ours = known[value] if known else option.conversion.ours(value)
        return choose(KINDS[option.objective], ours) if option.objective in KINDS else ours  # type: ignore[arg-type]

    def _theirs(self, option: Option, ours: Any) -> Any:
        """The framework's value of an option that sets a field of the objective; None where it has none."""
        if ours is None:
            return None
        if option.objective == "mode":
            names = {mode: name for name, mode in reversed([*self.framework.denominators.items()])}
            return names.get(ours)
        if not option.conversion.values:
            return option.conversion.theirs(ours)
        names = {
            str(row).partition("@")[0]: name for name, row in reversed([*option.conversion.values.items()])
        }
        return names.get(str(ours).partition("@")[0])

    def _options(self, named: NamedLoss, policy: Choice) -> dict[str, Any]:
        """The options that choose a loss, and those that set its parameters as `policy` has them."""
        row, options = choose("policy", named.row), dict[str, Any](named.options)
        for option in self.framework.options_of("policy"):
            sets = next((one for one in option.sets if one.is_of(policy.loss)), None)
            values = [policy.value(name) for name in sets.parameters] if sets else []
            same = [row.value(name) for name in sets.parameters] if sets else []
            if sets and values != same and len(set(values)) == 1 and not isinstance(values[0], dict):
                options[option.key] = sets.conversion.theirs(values[0])
        return options


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted keys as nested tables."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        *path, name = key.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return found
