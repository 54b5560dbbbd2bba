"""Keys of a config that verl does not have, and the keys of verl's that they probably stand for.

`own` is the config that verl composes without the user's options, with the tables `composer` of ours.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import yaml

from composer_plugins.adapters.verl_plugin.surface import NODE, WORKER_NODE
from composer_plugins.adapters.verl_plugin.upstream import options
from composer_plugins.config import at
from composer_plugins.errors import did_you_mean, near
from composer_plugins.findings import Finding
from composer_plugins.frameworks.verl import VERL, Key

TABLES = ("algorithm", "actor_rollout_ref", "data", "trainer")  # others pass any key on, to Ray for example


def nearest(key: str, own: Mapping[str, Any], value: Any = None) -> str:
    """Return the key of verl's that `key` may stand for; "" if verl has that key, or none like it.

    It is the key of this name in another table, if there is one only, or else the most alike in its table.
    Its value in `own` has the type of `value`. A KL in the loss is not the one in the reward.
    """
    if key in VERL.no_bearing or key in VERL.not_carried:
        return ""
    parts, table = key.split("."), own
    for place, part in enumerate(parts):
        if not isinstance(table, Mapping) or not table:
            return ""
        if part not in table:
            same = [one for one in options(own) if one.endswith(f".{parts[-1]}") and one != WORKER_NODE]
            same = [one for one in same if one != Key.REWARD_KL_COEF or parts[0] == "algorithm"]
            near_by = near(part, table, completes=False)
            alike = [".".join([*parts[:place], one, *parts[place + 1 :]]) for one in near_by]
            found = (same if len(same) == 1 else [*alike, ""])[0]
            return found if found and _fits(value, found, own) else ""
        table = table[part]
    return ""


def _fits(value: Any, key: str, own: Mapping[str, Any]) -> bool:
    """Whether verl's own value at the key, if it has that key, is of the type of this one."""
    is_ours = f"{key}.".startswith((f"{NODE}.", f"{WORKER_NODE}."))
    if is_ours or value is None or (isinstance(value, str) and "${" in value):
        return True
    if key not in options(own) and not isinstance(at(own, key), Mapping):
        return False
    theirs = at(own, key)
    if theirs is None:
        return True
    kinds = [kind for kind in (bool, int | float, str, list, Mapping) if isinstance(theirs, kind)]
    return isinstance(value, kinds[0]) and isinstance(value, bool) == isinstance(theirs, bool)


def misspelt(config: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning for each key that verl does not have. A table at the top may be a user's own."""
    read = {name: config[name] for name in TABLES if isinstance(config.get(name), Mapping)}
    others = {name: None for name in config if name not in own}  # misspelt tables
    for key in _unknown(read | others, own):
        meant = nearest(key, own, at(config, key))
        if meant or "." in key:
            remedy = did_you_mean([meant]) if meant else _without_a_guess(key, own)
            yield Finding("warning", key, "verl does not have this option", remedy)


def _without_a_guess(key: str, own: Mapping[str, Any]) -> str:
    """What to do about a key that stands for none of verl's by its spelling."""
    above, _, name = key.rpartition(".")
    beside = at(own, above) if above else own
    names = list(beside) if isinstance(beside, Mapping) else []
    longer = [one for one in names if one.startswith(name) or one.endswith(f"_{name}")]
    known = f" (verl has {', '.join(longer)})" if longer else ""
    return f"correct it{known}, or remove it, unless code of your own reads it"


def _unknown(table: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys that neither the table of verl's nor its dataclass has; an empty table takes any key."""
    known = {*own, *_fields(table)}
    for key, value in table.items() if own else ():
        if key not in known:
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping) and isinstance(own.get(key), Mapping):
            yield from _unknown(value, own[key], f"{prefix}{key}.")


def _fields(table: Mapping[str, Any]) -> set[str]:
    """Return the fields of the dataclass that hydra makes of a table."""
    module, _, name = str(table.get("_target_", "")).rpartition(".")
    try:
        return set(getattr(import_module(module), name).__dataclass_fields__)
    except Exception:  # no such class, or not a dataclass
        return set()


def corrected(message: str, own: Mapping[str, Any]) -> tuple[str, str]:
    """Return the override that hydra refuses because of its key, and the one that was meant.

    Two empty strings for another error of hydra's. A key needs a + before it if verl does not have it.
    """
    if present := re.search(r"Either remove \+ prefix: '(.+)' Or add a second \+", message):
        return f"+{present[1]}", present[1]
    if (refused := re.search(r"To append to your config use \+(.+)", message)) is None:
        return "", ""
    given = refused[1].strip()
    key, equals, value = given.partition("=")
    meant = nearest(key, own, _parsed(value))
    is_ours = f"{meant or key}.".startswith((f"{NODE}.", f"{WORKER_NODE}."))
    return given, f"{'' if meant and not is_ours else '+'}{meant or key}{equals}{value}"


def _parsed(value: str) -> Any:
    """Return an override's value as YAML reads it; None where it does not."""
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return None
