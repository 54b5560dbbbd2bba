"""The words of a framework's own command line: its config files, and its options as key=value.

`Framework.command_line` says how they are read: "hydra" (`a.b=c --config-name NAME`) or "flags"
(`--a.b c --config FILE`). What cannot be read is an error that names the word.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import Framework
from composer_plugins.objective.files import of_yaml, parsed, table_of

SHORT = {"-cp": "--config-path", "-cd": "--config-dir", "-cn": "--config-name"}  # of hydra's options


class CommandLine(NamedTuple):
    """What a framework's own command line gives it."""

    files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    config: str = ""  # the name of a config of the framework's own


def command_line(framework: Framework, words: Sequence[str]) -> CommandLine:
    """Read the words of a framework's command line, without its program."""
    if not framework.command_line:
        problem = f"the words of {framework.title}'s command line are not read"
        raise ConfigError("--", problem, "give its options before it, as key=value")
    return (of_hydra if framework.command_line == "hydra" else of_flags)(framework, words)


def not_read(framework: Framework, word: str, write: str) -> ConfigError:
    """The error for a word that is not read."""
    problem = f"{word!r} is no word of {framework.title}'s command line that is read here"
    return ConfigError("--", problem, f"{write}; -- stands in the place of the program that trains")


def of_hydra(framework: Framework, words: Sequence[str]) -> CommandLine:
    """Hydra's overrides, its options that name a config file, and the framework's own such option."""
    given, overrides, left = dict[str, str](), list[str](), iter(words)
    for word in left:
        key, sign, value = word.partition("=")
        key = SHORT.get(key, key)
        if key in {*SHORT.values(), framework.config_flag} - {""}:
            given[key] = value if sign else next(left, "")
        elif key.startswith("-") or not (key and sign or key.startswith("~")):
            raise not_read(framework, word, "write key=value, +key=value, ~key or --config-name NAME")
        else:
            overrides.append(word)
    files = [Path(given[framework.config_flag])] if framework.config_flag in given else []
    name = given.get("--config-name", "").removesuffix(".yaml")
    folders = [given[key] for key in ("--config-path", "--config-dir") if key in given]
    of_name = [Path(one, f"{name or next(iter(framework.configs), '')}.yaml") for one in folders]
    found = [one for one in of_name if one.is_file()][:1]
    if not found and name and name not in framework.configs:
        problem = f"{name}.yaml is not found{' in ' * bool(folders)}{' or '.join(folders)}"
        raise ConfigError("--config-name", problem, "name the folder of the file with --config-dir")
    return CommandLine((*files, *found), tuple(overrides), "" if found else name)


def of_flags(framework: Framework, words: Sequence[str]) -> CommandLine:
    """Options like `--beta 0.1 --no_shuffle --names a b`, and config files, which may stand in a table."""
    files, overrides, table = list[Path](), list[str](), ""
    groups = [*_grouped(framework, words), ("", [])]
    for (name, values), (following, _) in pairwise(groups):
        if name == framework.config_flag:
            if len(values) != 1:
                raise not_read(framework, " ".join([name, *values]), f"write {name} FILE")
            overrides += [f"{table}=@{values[0]}"] if table else []
            files += [] if table else [Path(values[0])]
            table = ""
        elif not values and following == "@":
            table = _key(name)
        else:
            overrides.append(_override(framework, _key(name), values))
    in_files = {key for file in files if framework.file_wins for key in table_of(file)}
    left = (one for one in overrides if one.partition("=")[0] not in in_files)
    return CommandLine(tuple(files), tuple(left))


def _grouped(framework: Framework, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values; "@FILE" as the option "@"."""
    values, most = list[str](), 0  # how many values the last option may have
    for word in words:
        name, sign, value = word.partition("=")
        if word.startswith("@") and framework.config_flag == "@":
            name, sign, value = "@", word[1:], word[1:]
        elif not name.startswith("--") or name == "--":
            if len(values) >= most:
                raise not_read(framework, word, "write --option value")
            values.append(word)
            continue
        values, most = [value] if sign else [], 1 if sign or name == "@" else len(words)
        yield name, values


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _override(framework: Framework, key: str, values: Sequence[str]) -> str:
    """An option as key=value, with a value that YAML reads as the framework does."""
    if not values and key.startswith("no_"):
        return f"{key[3:]}=false"
    is_text = any(one.key == key and isinstance(one.default, str) for one in framework.options)
    typed = [_typed(one, is_text) for one in values]
    return f"{key}={json.dumps(typed if len(typed) > 1 else typed[0] if typed else True, default=str)}"


def _typed(text: str, is_text: bool) -> Any:
    try:
        found = parsed(text, "", of_yaml)
    except ConfigError:  # a text that YAML does not read, as ([0]*3+[1]*45)
        return text
    return text if is_text and not isinstance(found, str) else found
