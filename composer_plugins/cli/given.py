"""What a command that reads configs is given: files and options, and a framework's own command line."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperCommand

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.files import one_config
from composer_plugins.objective.resolve import configs_of
from composer_plugins.objective.words import CommandLine, command_line

SCRIPT = re.compile(r".*\.(sh|bash|zsh|slurm|sbatch)(:\d+)?")
PYTHON = re.compile(r"(.*\.py)(:.*)?")
INSTEAD = (
    "put `composer-plugins doctor --framework verl --`, for example, in the place of `python3 -m "
    "verl.trainer.main_ppo` in it, and run it"
)


class WithWords(TyperCommand):
    """A command with the words after `--` in `context.obj`; None without `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


class Given(NamedTuple):
    """Config files and options."""

    what: str  # in words: "a.yaml + 3 overrides"
    framework: str  # "" where nothing names it
    files: list[Path]
    overrides: tuple[str, ...]
    config: str  # the name of a config of the framework's own

    def table(self) -> dict[str, Any]:
        """The config: the files with the options. Several files are an error where one run has one."""
        configs = configs_of(self.framework)
        read: Callable[..., dict[str, Any]] = getattr(configs, "merged_config", one_config)
        return read(self.files, self.overrides)


def read(words: Sequence[str], framework: str, after: Sequence[str] | None) -> Given:
    """Read the words of a command line. `framework` is the one that an option names.

    `after` are the words of its own command line. Raises ConfigError for a script.
    """
    if after is not None and not framework:
        remedy = "name it before --, with --framework (doctor) or --from (migrate)"
        raise ConfigError("--", "the framework whose command line follows is not named", remedy)
    more = CommandLine() if after is None else command_line(frameworks()[framework], after)
    options = tuple(one for one in words if ("=" in one or one.startswith("~")) and not os.path.isfile(one))
    named = [one for one in words if one not in options]
    for script in filter(SCRIPT.fullmatch, named):
        raise ConfigError(script, "a script is not read", INSTEAD)
    for python in filter(None, map(PYTHON.fullmatch, named)):
        remedy = (
            f"check a loss with `composer-plugins check {python[1]}:FUNCTION`, and of torchtitan name the "
        )
        remedy += "function that makes the config, as my_package.config_registry:my_config_function"
        raise ConfigError(python[0], "it is Python code, and not a config", remedy)
    files = [*map(Path, named), *more.files]
    overrides = (*options, *more.overrides)
    number = f"{len(overrides)} override{'s' * (len(overrides) > 1)}"
    names = [*map(str, files), *([more.config] if more.config else []), *([number] if overrides else [])]
    return Given(" + ".join(names) or "the environment", framework, files, overrides, more.config)
