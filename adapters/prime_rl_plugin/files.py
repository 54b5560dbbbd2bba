"""The user's TOML as PRIME-RL reads it: its files and the options of its command line, merged."""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from composer_plugins.config import at
from composer_plugins.objective.files import merged, replaced, table_of

TABLES = ("trainer", "orchestrator", "inference")  # one of them is in a file for `rl`
LOSS = "loss"  # this one is in a trainer's own file


def merged_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The config of a command line of PRIME-RL: its files from left to right, then its options.

    An option is "a.b=c", or "a.b=@FILE" for a file that stands in a table. "None" is null, as in its files.
    """
    tables = [table_of(file) for file in files]
    for key, _, name in (one.partition("=@") for one in overrides if "=@" in one):
        inner: dict[str, Any] = table_of(Path(name))
        for part in reversed(key.split(".")):
            inner = {part: inner}
        tables.append(inner)
    found = replaced(reduce(merged, tables, {}), [one for one in overrides if "=@" not in one])
    return {key: without_none(value, key) for key, value in found.items()}


def as_rl(config: dict[str, Any]) -> dict[str, Any]:
    """The config as an rl.toml has it: the options of a trainer's own file are in its table there."""
    return {"trainer": config} if LOSS in config and not {*TABLES} & config.keys() else config


def without_none(value: Any, name: str = "") -> Any:
    """The value with null for the text "None", but for the kwargs of a function, which get the text."""
    if isinstance(value, Mapping) and name != "kwargs":
        return {key: without_none(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [without_none(one) if isinstance(one, Mapping) else one for one in value]
    return None if value == "None" else value


def table_at(config: Any, path: str) -> dict[str, Any]:
    """The table at a dotted path; an empty table where the file has none."""
    found = at(config, path)
    return found if isinstance(found, dict) else {}
