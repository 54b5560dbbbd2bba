"""What a command that reads configs is given: files, options, and scripts that start a training."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import NOTHING, with_tables
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.files import one_config
from composer_plugins.objective.launch import SUFFIXES, launch, of_options
from composer_plugins.objective.resolve import surface
from composer_plugins.objective.shell_words import Word

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
        return one_config(self.files, self.overrides)


def read(words: Sequence[str], framework: str = "", script: Path | None = None) -> Given:
    """Read the words of a command line. `framework` is the one that an option names.

    Raises ConfigError for a script that starts no training, or that of another framework.
    """
    known = frameworks()
    if own_words := [one for one in words if one.startswith(("@", "--"))]:  # of a framework's command line
        own = next(one for one in known.values() if one.has_several_files)  # which alone has such words
        if framework not in ("", own.name):
            problem = f"{framework} takes no such word here"
            raise ConfigError(own_words[0], problem, "write key=value, or see --help")
        found_here = of_options(own, [Word(one) for one in words], Path())
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
    found = launch(scripts[0], [known[framework]] if framework in known else known.values())
    known_here = {one.lstrip("+~").partition("=")[0] for one in overrides}
    known_here |= set(surface(found.framework.name).NO_BEARING)
    return Given(
        what,
        found.framework.name,
        [*found.files, *files],
        (*found.overrides, *overrides),
        found.config,
        tuple(one for one in found.findings if known_here.isdisjoint(with_tables(one.key))),
        found.exported,
    )
