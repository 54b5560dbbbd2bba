"""A loss of ours in a framework's registry, as `composer/<name>`, or as `composer`.

verl and SkyRL have such registries. A table of our options in their configs says which loss `composer` is.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, unlikely
from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.losses.choosing import Choice, find_one
from composer_plugins.losses.row import Kind, Loss
from composer_plugins.objective.options import SetBy, as_yaml, not_read, parameters_set


class Parsed(NamedTuple):
    """What an advantage or a policy loss is asked for."""

    config: ComposerConfig
    choice: Choice
    set_by: Mapping[str, SetBy]  # the parameters of the loss that options of the framework set
    mode: Any = ""  # in which the framework reduces a policy loss, where it is known


def is_ours(name: str) -> bool:
    """Whether a registered name is `composer` or `composer/<name>`."""
    return name == "composer" or name.startswith("composer/")


def loss_in(name: str) -> str | None:
    """The loss in `composer/<name>`; None if the table of our options says which it is."""
    return name.removeprefix("composer/") if name.startswith("composer/") else None


def row_of(node: Mapping[str, Any], kind: Kind, name: str | None) -> Loss | None:
    """The row of the loss that runs; None for an unknown one, which `parse_choice` refuses."""
    named = name or node.get(kind, ComposerConfig.model_fields[kind].default)
    with suppress(ConfigError):
        return find_one(named.partition("@")[0], kind).loss if isinstance(named, str) else None
    return None


def parse_choice(
    framework: Framework,
    node: Mapping[str, Any],
    kind: Kind,
    name: str | None,
    given: Mapping[str, Any] = NOTHING,
    *,
    moved: Mapping[str, Any] = NOTHING,
    more: str = "",
    node_key: str,
    table: str = "",
    parse: Callable[[Mapping[str, Any]], ComposerConfig],
    check: Callable[[Choice], None],
) -> Parsed:
    """What a loss or an estimator is asked for. `name` is the loss in its registered name, if any.

    `moved` has the framework's own options that are not at their default, which the loss does not read, and
    `more` what a user pastes beside our options for the loss to get them; `given` has those that set its
    parameters (`given_options`). `node` has our options, below `node_key` of the
    config; `table` is another key below which this copy of them stands. `parse` makes a config of them, and
    `check` raises ConfigError for a loss that the framework cannot run.
    """
    wrong, set_by = Findings(), dict[str, SetBy]()
    loss, key = row_of(node, kind, name), f"{kind}_params"
    params = node.get(key) or {}
    with wrong.collected():
        if loss is not None and isinstance(params, Mapping):
            above = framework.tables[kind] + "." if framework.tables else ""

            def write(values: Mapping[str, Any]) -> str:
                return shlex.quote(f"{node_key}.{key}={as_yaml(values)}") + more

            wrong += not_read(framework, loss, params, moved, write)
            with suppress(KeyError):  # what follows is found as if the line of the remedy were pasted
                node = {**node, key: {**framework.parameters(loss, moved), **params}} if wrong else node
            at = {"table": above, "params_key": f"{node_key}.{key}"}
            set_by = parameters_set(framework, loss, params, given, **at)
            values = {name: one.value for name, one in set_by.items()}
            node = {**node, key: {**params, **values}} if values else node
    with wrong.collected(table or node_key):
        if name is not None and str(node.get(kind, name)).partition("@")[0] != name.partition("@")[0]:
            remedy = f"remove it, or write composer in place of composer/{name}"
            raise ConfigError(kind, f"{node[kind]!r} contradicts the name composer/{name}", remedy)
        config = parse(node if name is None else {kind: name, **node})
        choice = config.choose_policy() if kind == "policy" else config.choose_advantage()
        check(choice)
    enforce(wrong)
    return Parsed(config, choice, set_by)


def unlikely_value(parsed: Parsed, node_key: str) -> Iterator[Finding]:
    """Yield a warning for a value that hardly anyone intends, at the framework's option if one sets it."""
    choice = parsed.choice
    keys = {name: f"{node_key}.{choice.params_option}.{name}" for name in choice.loss.parameters}
    yield from unlikely(choice, keys | {name: one.key for name, one in parsed.set_by.items()})
