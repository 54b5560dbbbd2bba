"""`resolve`: what a framework trains with a config. `migrate`: the same for another framework.

A framework with an adapter has a module (`Framework.migration`) with `read(table, version)`, which returns
the `Objective`, `write(objective, version)`, which returns a config, `render(table)`, its text, and
`release(version)`, the release whose options these are. A framework without one is read and written by its
table: `by_table`. What the target cannot do is found by reading back what was written, so nobody keeps a
list of differences.

Every key of a config is one that is read, one of those that bear on the loss and have no field in
`Objective`, or one without a bearing on the loss. Any other key is not understood, and may bear on the loss.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from composer_plugins.errors import ComposerError, ConfigError, in_a_line, near
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.differences import Difference, differences
from composer_plugins.objective.objective import Objective


class Surface(Protocol):
    """How the configs of a framework are read and written."""

    @property
    def KNOWN(self) -> Collection[str]:
        """Names at the top of a config, by which one of the framework is recognised."""

    def read(self, table: Mapping[str, Any], version: str | None = None) -> Objective:
        """What the framework trains with this config, which may leave out what is at its default."""

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """A config for this objective, as far as the framework can run it."""

    def render(self, table: Mapping[str, Any]) -> str:
        """The text of a config."""

    def release(self, version: str | None = None) -> str:
        """The release whose options are read and written."""


class Migrated(NamedTuple):
    """A config of the target, and in what it differs from the source's."""

    text: str
    table: dict[str, Any]
    differences: tuple[Difference, ...]


def readable() -> dict[str, Framework]:
    """The frameworks whose configs can be read and written, by name."""
    return {name: one for name, one in frameworks().items() if is_readable(one)}


def is_readable(framework: Framework) -> bool:
    """Whether the configs of a framework can be read: by its adapter's module, or by its table."""
    return bool(framework.migration) or is_read_by_table(framework)


def is_read_by_table(framework: Framework) -> bool:
    """Whether the table of a framework says all that is needed to read its configs."""
    return bool(framework.options and framework.losses and not framework.migration)


def surface(name: str) -> Surface:
    """How the configs of a framework are read and written; ConfigError where it is not installed."""
    framework = frameworks()[name]
    if not framework.migration:
        return ByTable(framework)
    try:
        found: Any = import_module(framework.migration)
    except ImportError as error:
        remedy = f"run this command where {name} is installed"
        raise ConfigError(name, f"{error.name} is not installed here", remedy) from None
    adapter: Surface = found
    return adapter


def resolve(framework: str, table: Mapping[str, Any], version: str | None = None) -> Objective:
    """What `framework` trains with a config that was read from its file."""
    check_schema(frameworks()[framework], table)
    adapter = surface(framework)
    if table and not any(near(str(key).partition(".")[0], adapter.KNOWN) for key in table):
        problem = f"the config has none of {framework}'s tables or options, but {', '.join(map(str, table))}"
        raise ConfigError("--from", problem, "name the framework that the config is for")
    wrong_types = ArithmeticError, AttributeError, KeyError, TypeError, ValueError
    try:
        return adapter.read(table, version)
    except ComposerError:
        raise
    except wrong_types as error:  # a list where a number is read
        problem = f"a value has the wrong type, or {framework} refuses it: {in_a_line(error)}"
        raise ConfigError(f"the config of {framework}", problem, "correct the value") from None


def check_schema(framework: Framework, table: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config of another framework's schema."""
    if any(key in table for key in framework.marks):
        return
    for owner in frameworks().values():
        if owner is not framework and (found := [key for key in owner.marks if key in table]):
            verb = "stands" if len(found) == 1 else "stand"
            problem = f"the config is one of {owner.title}: {', '.join(found)} {verb} at its top"
            remedy = f"write the loss with {framework.name}'s options"
            if owner.name in readable():
                remedy = f"set --from {owner.name}"
            raise ConfigError("--from", problem, remedy)


def migrate(objective: Objective, target: str, version: str | None = None) -> Migrated:
    """A config of `target` for this objective, and everything in which the two differ.

    Raises ConfigError where the target cannot run the policy loss at all.
    """
    there = surface(target)
    table = there.write(objective, version)
    compared = there.write(replace(objective, no_policy=""), version)
    written = resolve(target, compared, version)
    if objective.group_size is None:
        written = replace(written, group_size=None)
    return Migrated(there.render(table), table, tuple(differences(objective, written)))
