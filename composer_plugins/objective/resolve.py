"""`resolve`: what a framework trains with a config, and what does not hold of it. `migrate`: for another one.

A framework with an adapter has a module (`Framework.migration`) with the functions of `Configs`. A framework
without one is read and written by its table: `by_table`. What the target cannot do is found by reading back
what was written, so nobody keeps a list of differences.

The keys that a table names are judged: those that are read, and those that bear on the loss and have no field
in `Objective`. Of any other key nothing is claimed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from composer_plugins.doctor import Examination
from composer_plugins.errors import ConfigError, Finding, Findings, error_of, in_a_line, unknown
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.differences import TO_CORRECT, Difference, differences
from composer_plugins.objective.keys import grouped
from composer_plugins.objective.objective import Objective


class Configs(Protocol):
    """How the configs of a framework are read and written."""

    @property
    def KNOWN(self) -> Collection[str]:
        """Names at the top of a config, or dotted keys, by which one of the framework is recognised."""

    def read(
        self, table: Mapping[str, Any], version: str | None = None
    ) -> tuple[Objective, Iterable[Finding]]:
        """What the framework trains with this config, and what does not hold of it.

        The config may leave out what is at its default. Raises ConfigError where it cannot be understood.
        """

    def unread(self, table: Mapping[str, Any], version: str | None = None) -> Iterable[str]:
        """The keys of a config that are not looked at."""

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """A config for this objective, as far as the framework can run it."""

    def render(self, table: Mapping[str, Any]) -> str:
        """The text of a config."""

    def release(self, version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
        """The release whose options are read, in this config, and written."""


class Resolved(NamedTuple):
    """What a framework trains with a config, and what does not hold of it."""

    objective: Objective | None  # None where an error leaves it open what is trained
    findings: Findings
    unread: tuple[str, ...]  # the keys that are not looked at
    release: str  # whose options were read, in words; "" for a loss that no config names

    def required(self) -> Objective:
        """The objective; one ConfigError with all errors if it has errors."""
        if self.objective is None:
            raise error_of(self.findings)
        return self.objective

    @property
    def errors(self) -> list[Finding]:
        """What the user has to correct before the framework runs the config."""
        return self.findings.errors


class Migrated(NamedTuple):
    """A config of the target, and in what it differs from the source's."""

    text: str
    table: dict[str, Any]
    differences: tuple[Difference, ...]


def readable() -> dict[str, Framework]:
    """The frameworks whose configs can be read and written, by name."""
    return {name: one for name, one in frameworks().items() if is_readable(one)}


def is_readable(framework: Framework) -> bool:
    """Whether the configs of a framework can be read: by its adapter's module, or by its whole table."""
    return bool(framework.migration or (framework.options and framework.losses))


def unreadable(option: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a framework whose configs cannot be read. `known` are those whose configs can."""
    framework = frameworks().get(name)
    if framework and framework.without_config:
        return ConfigError(option, f"{name} has no config file", framework.without_config)
    return unknown(option, name, known, noun="framework")


def configs_of(name: str) -> Configs:
    """How the configs of a framework are read and written; ConfigError where it is not installed."""
    framework = frameworks()[name]
    if not framework.migration:
        return ByTable(framework)
    try:
        return cast(Configs, import_module(framework.migration))
    except ImportError as error:
        remedy = f"run this command where {name} is installed"
        raise ConfigError(name, f"{error.name} is not installed here", remedy) from None


def resolve(
    framework: str, table: Mapping[str, Any], version: str | None = None, *, option: str = "--from"
) -> Resolved:
    """What `framework` trains with a config that was read from its file.

    Raises ConfigError if it is not a config of this framework, at the `option` that names the framework, or
    where the framework is not installed.
    """
    check_schema(frameworks()[framework], table, option)
    adapter = configs_of(framework)
    top = {one.partition(".")[0] for one in adapter.KNOWN}
    if table and not any(str(key).partition(".")[0] in top for key in table):
        problem = f"the config has none of {framework}'s tables or options, but {', '.join(map(str, table))}"
        raise ConfigError(option, problem, "name the framework that the config is for")
    wrong_types = ArithmeticError, AttributeError, KeyError, TypeError, ValueError
    objective, found, unread = None, Findings(), tuple[str, ...]()
    try:
        unread = tuple(dict.fromkeys(adapter.unread(table, version)))
        with found.collected():
            objective, more = adapter.read(table, version)
            found += more
    except wrong_types as error:  # a list where a number is read
        problem = f"a value has the wrong type, or {framework} refuses it: {in_a_line(error)}"
        found.append(Finding("error", f"the config of {framework}", problem, "correct the value"))
    return Resolved(objective, found, unread, adapter.release(version, table))


def examine(framework: str, table: Mapping[str, Any], version: str | None = None) -> Examination:
    """What a doctor says of a config, without a look at the environment that will train."""
    found = resolve(framework, table, version, option="--framework")
    rest = f"; not looked at: {grouped(found.unread)}" if found.unread else ""
    return Examination(f"the options of {found.release}{rest}", tuple(found.findings))


def check_schema(framework: Framework, table: Mapping[str, Any], option: str) -> None:
    """Raise ConfigError for a config of another framework's schema."""
    if any(key in table for key in framework.marks):
        return
    for owner in frameworks().values():
        if owner is not framework and (found := [key for key in owner.marks if key in table]):
            verb = "stands" if len(found) == 1 else "stand"
            problem = f"the config is one of {owner.title}: {', '.join(found)} {verb} at its top"
            remedy = f"write the loss with {framework.name}'s options"
            if owner.name in readable():
                remedy = f"set {option} {owner.name}"
            raise ConfigError(option, problem, remedy)


def migrate(objective: Objective, target: str, version: str | None = None) -> Migrated:
    """A config of `target` for this objective, and everything in which the two differ.

    Raises ConfigError where the target cannot run the policy loss at all.
    """
    there = configs_of(target)
    table = there.write(objective, version)
    read = resolve(target, there.write(replace(objective, no_policy=""), version), version)
    written = read.required()
    if objective.group_size is None:
        written = replace(written, group_size=None)
    found = [*differences(objective, written), *(Difference(TO_CORRECT, str(one), "") for one in read.errors)]
    return Migrated(there.render(table), table, tuple(found))
