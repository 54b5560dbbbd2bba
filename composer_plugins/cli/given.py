"""What a command that reads configs is given: files, options, scripts, a framework's own command line."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperCommand

from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import NOTHING, with_tables
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.files import one_config
from composer_plugins.objective.launch import SUFFIXES, launch, of_options
from composer_plugins.objective.resolve import surface
from composer_plugins.objective.shell_words import Word
from composer_plugins.objective.words import command_line

SCRIPT = re.compile(rf".*({'|'.join(map(re.escape, SUFFIXES))})(:\d+)?")


class WithWords(TyperCommand):
    """A command with the words after `--` in `context.obj`; None without `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


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


def read_all(words: Sequence[str], framework: str, script: Path | None, after: Sequence[str] | None) -> Given:
    """Read the words of a command line, with those of the framework's own after `--`."""
    found = read(words, framework, script)
    if after is None:
        return found
    if not framework:
        remedy = "name it before --, with --framework (doctor) or --from (migrate)"
        raise ConfigError("--", "the framework whose command line follows is not named", remedy)
    more = command_line(frameworks()[framework], after)
    files, overrides = [*found.files, *more.files], (*found.overrides, *more.overrides)
    number = f"{len(overrides)} override{'s' * (len(overrides) > 1)}"
    names = [*map(str, files), *([more.config] if more.config else []), *([number] if overrides else [])]
    return Given(" + ".join(names) or "the environment", framework, files, overrides, more.config)


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
