"""The keys of a config: which are not understood, which are not carried over, and values of a wrong type."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_plugins.config import at
from composer_plugins.errors import ConfigError
from composer_plugins.losses.row import Parameter

# The numbers among a framework's options: each is checked, and the error is worded, as a parameter of ours.
NUMBER, WEIGHT = Parameter("of either sign"), Parameter("of a term", low=0)
POSITIVE = Parameter("a temperature", low=math.ulp(0.0))
COUNT = Parameter("of completions or tokens", low=1, integer=True)


def not_understood(config: Mapping[str, Any], known: Collection[str], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config that `known` does not have. A known key covers everything below it.

    A key in a list of tables has no number. A table is one key if nothing in it is known.
    """
    for name, value in config.items():
        key = f"{above}{name}"
        if key in known:
            continue
        inner = value if isinstance(value, list) else [value]
        is_a_table = all(one is None or isinstance(one, Mapping) for one in inner)
        if is_a_table and any(one.startswith(f"{key}.") for one in known):
            for one in inner:
                yield from not_understood(one or {}, known, f"{key}.")
        elif value != {}:
            yield key


def not_carried(config: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield "key = value" for each key of `neutral` with another value than those, which change nothing."""
    for key, values in neutral.items():
        if (found := at(config, key)) not in values:
            yield f"{key} = {found!r}"


def check_flag(key: str, value: Any) -> None:
    """Raise ConfigError unless an option is true or false; the text "False" counts as true in Python."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"it is {value!r}", "set true or false")


def check_tables(config: Mapping[str, Any], *paths: str) -> None:
    """Raise ConfigError where another value stands in the place of a table; `paths` are dotted."""
    for path in paths:
        found = at(config, path)
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(path, f"it is {found!r}", "write a table of options")
