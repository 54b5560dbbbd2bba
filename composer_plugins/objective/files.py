"""The config files of the frameworks: a YAML or a TOML as a table, with the options of a command line."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import yaml

from composer_plugins.config import ABSENT, entry
from composer_plugins.errors import ConfigError, in_a_line

DEEPEST = 20  # how often one interpolation may lead to another


def one_config(files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """The config of a file, or of none, with the options of a command line; several files are an error."""
    return replaced(_of_one(files, table_of), overrides)


def inheriting(files: Sequence[Path], overrides: Sequence[str], key: str) -> dict[str, Any]:
    """The config of a file that names at `key` the files whose options it replaces, or of none.

    As NeMo-RL merges them: a table of the later file is merged with the earlier one's, unless it has
    `_override_`. `${a.b}` is the value at a.b, with the options of the command line.
    """
    table = replaced(_of_one(files, lambda file: _with_bases(file, key)), overrides)
    return cast(dict[str, Any], _interpolated(table, table))


def _of_one(files: Sequence[Path], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What the one file holds, or nothing of none."""
    if len(files) > 1:
        raise ConfigError("FILE", f"{len(files)} are given", "give one config file")
    return read(files[0]) if files else {}


def _with_bases(file: Path, key: str) -> dict[str, Any]:
    """A file merged over those that it names, depth first."""
    table = table_of(file)
    bases, found = table.pop(key, None) or [], dict[str, Any]()
    for base in [bases] if isinstance(bases, str) else bases:
        found = merged(found, _with_bases(file.parent / str(base), key))
    for name, value in table.items():
        if isinstance(value, dict) and value.pop("_override_", False):
            found.pop(name, None)
    return merged(found, table)


def merged(below: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables merged key by key: the later value wins, and a list is one value."""
    found = dict(below)
    for name, value in table.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def _interpolated(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The value with `${a.b}` replaced. What names no entry, as a resolver's call, stays as it is."""
    if isinstance(value, Mapping):
        return {key: _interpolated(one, root, depth) for key, one in value.items()}
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and depth < DEEPEST:
        found = entry(root, value[2:-1])
        return value if found is ABSENT else _interpolated(found, root, depth + 1)
    return value


def replaced(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The table with the options of a command line: key=value, +key=value, and ~key to remove one."""
    found: dict[str, Any] = deepcopy(dict(table))
    for one in overrides:
        key, _, text = one.lstrip("+~").partition("=")
        *path, name = key.split(".")
        if not all([*path, name]):
            raise ConfigError(one, "it names no option", "write key=value")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(key, f"{part} is {inner!r} in the file", "write a table of options there")
        if one.startswith("~"):
            inner.pop(name, None)
        else:
            inner[name] = parsed(text, key, of_yaml)
    return found


def table_of(file: Path) -> dict[str, Any]:
    """A YAML or a TOML file as a table."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"cannot be read: {in_a_line(error)}", "name a text file") from None
    found = parsed(text, str(file), tomllib.loads if file.suffix == ".toml" else of_yaml)
    if not isinstance(found, dict):
        raise ConfigError(str(file), f"it holds {found!r}", "give a file with a table of options")
    return found


def parsed(text: str, key: str, parse: Callable[[str], Any]) -> Any:
    """What a text holds; `key` says in an error where the text is from."""
    try:
        return parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(key, f"cannot be parsed: {in_a_line(error)}", "correct it") from None


def of_yaml(text: str) -> Any:
    """What a text of YAML holds, with 1e-3 as a number."""
    return yaml.load(text, Loader=Loader)


class Loader(yaml.SafeLoader):
    """yaml's safe loader, with an error for a key that stands twice in a table: the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The table of a node."""
        names = [one.value for one, _ in node.value if isinstance(one, yaml.ScalarNode) and one.value != "<<"]
        if twice := [one for one in dict.fromkeys(names) if names.count(one) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice[0]} stands twice in a table", node.start_mark
            )
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


# 1e-3 is a number, as verl's parser has it; in YAML 1.1 it is a text.
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
