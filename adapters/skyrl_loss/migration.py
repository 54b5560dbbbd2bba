"""SkyRL's side of `migrate`: what a config trains, and a config for what is to be trained."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from composer_plugins.adapters.skyrl_loss.correction import correction_options
from composer_plugins.adapters.skyrl_loss.options import Configs
from composer_plugins.adapters.skyrl_loss.upstream import moved
from composer_plugins.errors import Finding, enforce
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.skyrl import NODE, Key
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import Kind
from composer_plugins.objective.by_table import nested
from composer_plugins.objective.objective import Objective, named, named_policy
from composer_plugins.objective.options import as_yaml

_CONFIGS = Configs()
KNOWN = _CONFIGS.KNOWN


def unread(table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """The keys that are not understood."""
    return Configs(version).unread(table)


def read(table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
    """What SkyRL trains with this config, and what does not hold of it."""
    return Configs(version).read(table)


def release(version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
    """The release whose options are read and written."""
    return Configs(version).release()


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """A config for this objective: SkyRL's own loss where it is the same, and ours otherwise."""
    configs = Configs(version)
    of_others = (*skyrl.UNAVAILABLE, "hint_", "replay_", "teacher_")
    node = {name: x for name, x in objective.channels.items() if not name.startswith(of_others)}
    options = None if objective.no_policy or node else own_loss(configs, "policy", objective.policy)
    if options is not None:
        read_back = configs.read(nested(options))[0]
        if (read_back.old, read_back.rollout) != (objective.old, objective.rollout):
            options = None
    if options is None:
        options, node = {Key.POLICY: "composer"}, node | named_policy(objective)
    if objective.advantage is not None:
        theirs = own_loss(configs, "advantage", objective.advantage)
        options |= theirs or {Key.ESTIMATOR: "composer"}
        node |= {} if theirs else named("advantage", objective.advantage)
    if node:
        options |= {NODE: node, Key.ENTRYPOINT: skyrl.ENTRYPOINT}
    if objective.mode == "seq-mean-token-sum":
        options |= {Key.REDUCTION: skyrl.NORM, Key.LENGTH: 1}
    kl = objective.kl
    options |= (kl and configs.written("kl", kl.estimator)) or {}
    options = configs.with_fields(options, objective, kl) | correction_options(objective.correction)
    if kl is None:
        options.pop(Key.KL_COEF)
    if kl is None or kl.place == "reward":
        options |= {Key.USE_KL: False, Key.KL_IN_REWARD: kl is not None}
    return nested(
        {key: x for key, x in options.items() if key == Key.POLICY or x != configs.defaults.get(key, ())}
    )


def own_loss(configs: Configs, kind: Kind, wanted: Choice) -> dict[str, Any] | None:
    """SkyRL's options for its own loss, where it has one that is the same; None otherwise."""
    found = configs.written(kind, wanted, is_exact=True)
    return None if found is None or found.get(Key.POLICY) in skyrl.FOLDED else found


def render(table: Mapping[str, Any]) -> str:
    """The config as a command: SkyRL takes options, and no file."""
    words = [shlex.quote(f"{key}={x if isinstance(x, str) else as_yaml(x)}") for key, x in _leaves(table)]
    return " \\\n  ".join(["python -m skyrl.train.entrypoints.main_base", *words]) + "\n"


def check(config: Any) -> None:
    """Raise ConfigError for what is wrong in a whole config of SkyRL's class, and warn of the rest."""
    table = asdict(config)
    table["trainer"]["override_entrypoint"] = skyrl.ENTRYPOINT
    enforce(Configs(moved=moved(config.trainer.algorithm)).read(table)[1])


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
