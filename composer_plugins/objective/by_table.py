"""The configs of a framework that has a table and no module of its own: read, written and examined."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import yaml

from composer_plugins.config import ABSENT, at, entry
from composer_plugins.errors import ConfigError, Finding, unknown
from composer_plugins.frameworks.contract import NOTHING, Framework, NamedLoss, Option, parameters_of
from composer_plugins.losses.choosing import Choice, choose, find_one
from composer_plugins.losses.row import REQUIRED, Kind
from composer_plugins.objective.files import inheriting
from composer_plugins.objective.keys import COUNT, NUMBER, POSITIVE, WEIGHT, not_carried, not_looked_at
from composer_plugins.objective.objective import (
    KL,
    MISSING,
    Objective,
    as_dr_grpo,
    behaviours,
    without_policy,
)
from composer_plugins.objective.options import given_options

# By the field of the objective that an option sets: its range, or the kind of the row that it names.
NUMBERS = {"entropy": NUMBER, "temperature": POSITIVE, "group_size": COUNT, "length": COUNT}
NUMBERS |= {"kl.weight": WEIGHT}
KINDS = {"kl.estimator": "kl", "advantage": "advantage"}


class ByTable:
    """The configs of one framework, by its table (`frameworks.contract.Framework`)."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.choosers = self._choosers("policy")
        named = ((key, value) for one in reversed(framework.losses) for key, value in one.options.items())
        self.defaults = dict(named) | {one.key: one.default for one in framework.options}
        # Whether the table says which options each loss reads. Otherwise each reads all options of its kind.
        self.has_own = any(one.own for one in framework.losses)
        self.KNOWN = {*self.defaults, *framework.not_carried}
        if framework.inherits:
            self.merged_config = partial(inheriting, key=framework.inherits)

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What the framework trains with this config, and what does not hold of it.

        Raises ConfigError for a loss, a denominator or a value that the framework does not have, and for an
        option that its loss does not read.
        """
        if why := next((why for key, why in self.framework.trains_otherwise.items() if key in table), ""):
            return without_policy(why), []
        return self.objective(table, self.policy(table)), []

    def unread(self, table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
        """The keys that are not looked at."""
        # No key bears on a policy loss where the config trains none of the table.
        otherwise = {*table} if self.framework.trains_otherwise.keys() & table.keys() else set()
        return not_looked_at(table, {*self.KNOWN, *otherwise})

    def objective(
        self, table: Mapping[str, Any], policy: Choice, advantage: Choice | None = None
    ) -> Objective:
        """What is trained with these losses and with the other options of the config.

        `advantage` is one that is not of the table. None: the one that the config names.
        """
        fields = ((one.objective, self.converted(one, table)) for one in self._of_the_objective())
        found: dict[str, Any] = {field: value for field, value in fields if value is not None}
        mode = found.get("mode") or next(iter(self.framework.denominators.values()), policy.mode)
        whose: Any = found.get("old") or "trainer"
        old, rollout = behaviours(policy, whose, found.get("rollout", "rollout engine"))
        kl = None
        if weight := found.get("kl.weight"):
            estimator = found.get("kl.estimator") or self._chosen("kl", table) or choose("kl", "k3")
            place: Any = found.get("kl.place") or "loss"
            ratio_to: Any = found.get("kl.old") or whose
            kl = KL(estimator, weight, place, ratio_to)
        remarks = list(not_carried(table, self.framework.not_carried))
        advantage = advantage or found.get("advantage") or self._chosen("advantage", table)
        for kind in ("advantage", "correction"):
            if (kind == "correction" or advantage is None) and (key := self.not_in_catalogue(kind, table)):
                values = (f"{one} = {self.value(one, table)!r}" for one in self._choosers(kind))
                remarks.append(f"no {kind} of the catalogue ({key}): {', '.join(values)}")
        return Objective(
            policy=policy,
            mode=mode,
            length=found.get("length"),
            old=old,
            rollout=rollout,
            advantage=advantage,
            group_size=found.get("group_size"),
            kl=kl,
            correction=self._chosen("correction", table),
            entropy=found.get("entropy") or 0.0,
            temperature=found.get("temperature") or 1.0,
            denominators={"KL": mode, "entropy bonus": mode},
            remarks=tuple(remarks),
        )

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """A config for this objective, as far as the framework runs it; ConfigError without such a loss."""
        kl = objective.kl if objective.kl and objective.kl.place == "loss" else None
        if objective.no_policy:
            options: dict[str, Any] = {self.choosers[0]: MISSING}
        else:
            name = objective.policy.loss.name
            if (named := self.written("policy", objective.policy)) is None:
                having = (one.row for one in self.framework.losses if one.kind == "policy")
                problem = f"{self.framework.title} has no loss {name!r} of its own"
                remedy = f"choose one of {', '.join(dict.fromkeys(having))}"
                if self.framework.path and self.framework.runs(objective.policy.loss):
                    module, _, adapter = self.framework.path.partition(":")
                    remedy += f", or change its launch script, so that it trains with {adapter} of {module}"
                raise ConfigError("--to", problem, remedy)
            options = named
        for kind, choice in (
            ("advantage", objective.advantage and as_dr_grpo(objective.advantage)),
            ("kl", kl and kl.estimator),
            ("correction", objective.correction),
        ):
            options |= (choice and self.written(kind, choice, options)) or {}  # type: ignore[arg-type]
        return nested(self.with_fields(options, objective, kl))

    def with_fields(self, options: Mapping[str, Any], objective: Objective, kl: KL | None) -> dict[str, Any]:
        """These options, which choose the losses, and those that set the other fields of an objective."""
        found, advantage = dict(options), objective.advantage and as_dr_grpo(objective.advantage)
        ours = {field: getattr(objective, field) for field in NUMBERS if field != "kl.weight"}
        named = None if objective.no_policy else self.named("policy", nested(options))
        mode = (named and named.needs_mode) or objective.mode
        ours |= {"mode": mode, "advantage": advantage and advantage.name}
        ours |= {"kl.weight": kl.weight if kl else 0.0, "kl.estimator": kl and kl.estimator.name}
        ours |= {"old": objective.old, "rollout": objective.rollout, "kl.old": kl and kl.old}
        for option in self._of_the_objective():
            theirs = self._theirs(option, ours.get(option.objective))
            if theirs is None or option.key in found or option.fallback:
                continue
            other, needed = option.only_with or ("", None)
            if other in found and not option.is_read_beside(found[other]):
                continue
            if other and not theirs:
                continue  # switched off where nothing is set
            if theirs != option.default:
                found[option.key] = theirs
            if other:
                found[other] = needed
        return found

    def render(self, table: Mapping[str, Any]) -> str:
        """The config as YAML."""
        return yaml.safe_dump(dict(table), sort_keys=False)

    def release(self, version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
        """The release whose options the table has."""
        return f"{self.framework.title} {self.framework.release}".strip()

    def _of_the_objective(self) -> list[Option]:
        return [one for one in self.framework.options if one.objective]

    def _choosers(self, kind: Kind) -> tuple[str, ...]:
        """The options that choose the loss of a kind."""
        losses = (one for one in self.framework.losses if one.kind == kind)
        return tuple(dict.fromkeys(key for one in losses for key in one.options))

    def named(self, kind: Kind, table: Mapping[str, Any]) -> NamedLoss | None:
        """The loss of a kind that the config names, if one of the table's has all these options."""
        wanted = {key: self.value(key, table) for key in self._choosers(kind)}
        losses = [one for one in self.framework.losses if one.kind == kind]
        return next((one for one in losses if one.options.items() <= wanted.items()), None)

    def _read_by(self, named: NamedLoss) -> Iterable[Option]:
        """The options that set the parameters of a loss of the framework's own."""
        return named.own if self.has_own else self.framework.options_of(named.kind)

    def given(
        self, table: Mapping[str, Any], kind: Kind = "policy", options: Iterable[Option] | None = None
    ) -> dict[str, Any]:
        """The options of a kind, or `options`, that are not at their default. A null may switch one off."""

        def value_of(key: str, default: Any) -> Any:
            found = entry(table, key)
            return default if found is ABSENT or (found is None and kind == "policy") else found

        return given_options(self.framework.options_of(kind) if options is None else options, value_of)

    def _chosen(self, kind: Kind, table: Mapping[str, Any]) -> Choice | None:
        """The loss of another kind that the config names, with its parameters; None where it names none."""
        if (named := self.named(kind, table)) is not None:
            return self.with_parameters(named, table)
        if kind == "kl" and (key := self.not_in_catalogue(kind, table)):
            known = {str(one.options[key]) for one in self.framework.losses if key in one.options}
            raise unknown(key, str(self.value(key, table)), known, noun="value")
        return None

    def not_in_catalogue(self, kind: Kind, table: Mapping[str, Any]) -> str:
        """The option by which a config names a loss of this kind that no row has; "" without one."""
        keys = self._choosers(kind)
        if not keys or self.named(kind, table) is not None:
            return ""
        if kind == "correction" and not self.value(keys[0], table):  # the option that switches one on
            return ""
        is_set = [key for key in keys if self.value(key, table) != self.value(key, {})]
        return (is_set or [keys[0] if kind == "advantage" else ""])[-1]

    def with_parameters(self, named: NamedLoss, table: Mapping[str, Any]) -> Choice:
        """A loss of the framework's own with its parameters."""
        choice, read = find_one(named.row, named.kind), self._read_by(named)
        given = self.given(table, named.kind, read)
        params = {**choice.params, **named.params, **self.framework.parameters(choice.loss, given)}
        for name, default in choice.loss.defaults.items():
            if default is REQUIRED and name not in params:
                keys = [one.key for one in read if name in parameters_of(one.sets, choice.loss)]
                problem = f"{choice.name!r} has no default for its {name}"
                raise ConfigError(", ".join(keys) or named.kind, problem, "set it")
        return choose(named.kind, named.row, params, option=named.kind)

    def policy(self, table: Mapping[str, Any]) -> Choice:
        """The policy loss that the config names, with its parameters."""
        if (named := self.named("policy", table)) is not None:
            return self.with_parameters(named, table)
        losses = [one for one in self.framework.losses if one.kind == "policy"]
        given = {key: value for key in self.choosers if (value := entry(table, key)) is not ABSENT}
        for key, value in given.items():
            if value not in (known := [one.options.get(key) for one in losses]):
                raise unknown(key, str(value), dict.fromkeys(map(str, known)), noun="loss")
        together = " and ".join(f"{key}={value!r}" for key, value in given.items())
        problem = f"{self.framework.title} has no loss of the catalogue with {together}"
        raise ConfigError(next(iter(given)), problem, "set one of them to its default")

    def converted(self, option: Option, table: Mapping[str, Any]) -> Any:
        """The value of the objective's field that an option sets; None where another option keeps it off."""
        value = self.value(option.key, table)
        if value is None or (option.only_with and not option.is_read_beside(at(table, option.only_with[0]))):
            return None
        if option.objective in NUMBERS:
            NUMBERS[option.objective].check(option.key, value, option.default)
        known = self.framework.values_of(option)
        if known and (not isinstance(value, Hashable) or value not in known):
            raise unknown(option.key, str(value), map(str, known), noun="value")
        ours = known[value] if known else option.conversion.ours(value)
        return choose(KINDS[option.objective], ours) if option.objective in KINDS else ours  # type: ignore[arg-type]

    def value(self, key: str, table: Mapping[str, Any]) -> Any:
        """The value of an option; its default where the config has none, or null."""
        found = at(table, key)
        return self.defaults.get(key) if found is None else found

    def _theirs(self, option: Option, ours: Any) -> Any:
        """The framework's value of an option that sets a field of the objective; None where it has none."""
        if ours is None:
            return None
        if option.objective == "mode":
            known = self.framework.values_of(option)
            return {mode: name for name, mode in reversed([*known.items()])}.get(ours)
        if not option.conversion.values:
            return option.conversion.theirs(ours)
        names = {
            str(row).partition("@")[0]: name for name, row in reversed([*option.conversion.values.items()])
        }
        return names.get(str(ours).partition("@")[0])

    def written(
        self, kind: Kind, choice: Choice, chosen: Mapping[str, Any] = NOTHING, *, is_exact: bool = False
    ) -> dict[str, Any] | None:
        """The options that choose this loss with its parameters, the fewest; None if no loss fits.

        `chosen` are options of other losses, which these must not contradict. With `is_exact`, a loss with
        another value of a parameter does not fit.
        """
        losses = [
            one
            for one in self.framework.losses
            if one.kind == kind and all(chosen.get(key, value) == value for key, value in one.options.items())
        ]
        having = [one for one in losses if find_one(one.row, kind).loss.is_formula_of(choice.loss)]
        if not having and kind == "kl":  # the same estimator with or without a ratio, which reading back says
            base = choice.loss.name.removesuffix("_corrected")
            having = [one for one in losses if one.row.partition("@")[0].removesuffix("_corrected") == base]
        # The fewest parameters that are not as in `choice`, then the same name, then the fewest options.
        found = [
            (differing, one.row.partition("@")[0] != choice.loss.name, len(options), options)
            for one in having
            for options, differing in (self._options(one, choice),)
            if not (is_exact and differing)
        ]
        return min(found, key=lambda one: one[:3])[3] if found else None

    def _options(self, named: NamedLoss, choice: Choice) -> tuple[dict[str, Any], int]:
        """The options that choose a loss and set its parameters; and how many are not as in `choice`."""
        row, options = find_one(named.row, named.kind), dict[str, Any](named.options)
        now = {name: row.value(name) for name in choice.loss.parameters} | dict(named.params)
        own = tuple(self._read_by(named))
        for option in own:
            sets = next((one for one in option.sets if one.is_of(row.loss)), None)
            if sets is None or not {*sets.parameters} <= {*choice.loss.parameters}:
                continue
            if isinstance(value := choice.value(sets.parameters[0]), dict):
                continue
            # Of several parameters, those that no option sets alone.
            alone = {x.parameters[0] for one in own for x in one.sets if len(x.parameters) == 1}
            decided = [name for name in sets.parameters if len(sets.parameters) == 1 or name not in alone]
            values = {choice.value(name) for name in decided or sets.parameters}
            if len(values) == 1 and any(now[name] not in values for name in decided or sets.parameters):
                written = value
                if value is None and option.default is not None and named.kind == "policy":  # not taken there
                    written = choice.loss.parameters[sets.parameters[0]].no_bound
                    if written is None:
                        continue
                with suppress(KeyError):  # of a value that the option does not have
                    options[option.key] = sets.conversion.theirs(written)
                    now |= dict.fromkeys(sets.parameters, value)
        return options, sum(value != choice.value(name) for name, value in now.items())


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
