"""What a command that reads configs is given: files, options, and scripts that start a training."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.files import replaced, table_of
from composer_plugins.objective.launch import SUFFIXES, launch, of_options
from composer_plugins.objective.resolve import surface
from composer_plugins.objective.shell_words import Word

PRIME_RL = "prime-rl"  # whose command line `@ FILE --a.b value` names its framework
SCRIPT = re.compile(rf".*({'|'.join(map(re.escape, SUFFIXES))})(:\d+)?")


class Given(NamedTuple):
    """Config files and options. Of a script, what it gives the framework that it starts."""

    what: str  # in words: "a.yaml + 3 overrides"
    framework: str  # "" where nothing names it
    files: list[Path]
    overrides: tuple[str, ...]
    config: str = ""  # the name of a config of the framework's own
    findings: tuple[Finding, ...] = ()  # what a script gives and is not known
    exported: Mapping[str, str] = NOTHING  # the environment that a script sets

    def table(self) -> dict[str, Any]:
        """The config: the files with the options. Several files are an error where one run has one."""
        merged = getattr(surface(self.framework), "merged_config", None)
        if merged is not None:
            found: dict[str, Any] = merged(self.files, self.overrides)
            return found
        if len(self.files) > 1:
            raise ConfigError("FILE", f"{len(self.files)} are given", "give one config file")
        return replaced(next(map(table_of, self.files), {}), self.overrides)


def is_below(key: str, tables: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(key.rsplit(".", cut)[0] in tables for cut in range(key.count(".") + 1))


def read(words: Sequence[str], framework: str = "", script: Path | None = None) -> Given:
    """Read the words of a command line. `framework` is the one that an option names.

    Raises ConfigError for a script that starts no training, or that of another framework.
    """
    own = frameworks().get(framework or PRIME_RL)
    if any(one.startswith(("@", "--")) for one in words):  # a command line of the framework's own
        if own is None or not own.has_several_files:
            wrong = next(one for one in words if one.startswith(("@", "--")))
            raise ConfigError(wrong, f"{framework} takes no such word here", "write key=value, or see --help")
        found_here = of_options(own, [Word(one, "") for one in words], Path())
        framework, words = own.name, [*map(str, found_here.files), *found_here.overrides]
        for one in found_here.findings:
            raise ConfigError(one.key, one.problem, one.remedy)
    overrides = tuple(one for one in words if ("=" in one or one.startswith("~")) and not os.path.isfile(one))
    names = [one for one in words if one not in overrides]
    scripts = [*([str(script)] if script else []), *(one for one in names if SCRIPT.fullmatch(one))]
    files = [Path(one) for one in names if one not in scripts]
    number = f"{len(overrides)} override{'s' * (len(overrides) > 1)}"
    what = " + ".join([*scripts, *map(str, files), *([number] if overrides else [])]) or "the environment"
    if not scripts:
        return Given(what, framework, files, overrides)
    if len(scripts) > 1:
        raise ConfigError("FILE", f"{', '.join(scripts)} are several scripts", "give one")
    known = frameworks()
    found = launch(scripts[0], [known[framework]] if framework in known else known.values())
    known_here = {one.lstrip("+~").partition("=")[0] for one in overrides}
    known_here |= set(surface(found.framework.name).NO_BEARING)
    return Given(
        what,
        found.framework.name,
        [*found.files, *files],
        (*found.overrides, *overrides),
        found.config,
        tuple(one for one in found.findings if not is_below(one.key, known_here)),
        found.exported,
    )
