"""The keys of a config: which are not looked at, which are not carried over, and values of a wrong type."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_plugins.config import at
from composer_plugins.errors import ConfigError
from composer_plugins.losses.row import Parameter

# The numbers among a framework's options: each is checked, and the error is worded, like our parameters.
NUMBER, WEIGHT = Parameter("of either sign"), Parameter("of a term", low=0)
POSITIVE = Parameter("a temperature", low=math.ulp(0.0))
MOST = 20  # names in a line
COUNT = Parameter("of completions or tokens", low=1, integer=True)


def not_looked_at(config: Mapping[str, Any], known: Collection[str], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config that `known` does not have. A known key covers everything below it.

    A key in a list of tables has no number.
    """
    for name, value in config.items():
        key = f"{above}{name}"
        inner = value if isinstance(value, list) else [value]
        if key in known or value == {}:
            continue
        if inner and all(isinstance(one, Mapping) for one in inner):
            for one in inner:
                yield from not_looked_at(one, known, f"{key}.")
        else:
            yield key


def grouped(keys: Collection[str]) -> str:
    """Keys in a line, with their number below each table: "data.* (12), trainer.* (20), seed"."""
    tables = Counter(key.partition(".")[0] for key in keys)
    alone = {key.partition(".")[0]: key for key in keys}
    names = [f"{table}.* ({number})" if number > 1 else alone[table] for table, number in tables.items()]
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more} more" if more > 0 else "")


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
