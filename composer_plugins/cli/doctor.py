"""`composer-plugins doctor`: check the config of a framework before training.

Each adapter knows its framework. Its package `doctor` is imported when it is asked for, and has

    examine(files, target) -> Examination

It never imports the framework here. What it needs to know of the interpreter that will train, it asks there.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli.console import answer, foreign_code
from composer_plugins.diagnosis import Examination, Target
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.findings import Finding, Severity
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import OURS, frameworks
from composer_plugins.objective.files import replaced, table_of
from composer_plugins.objective.resolve import examine, is_readable

STYLES: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}
NOUNS: dict[Severity, tuple[str, str]] = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "info": ("remark", "remarks"),
}


def examinable() -> dict[str, Framework]:
    """The frameworks whose configs can be examined, by name: by their doctor, or by `resolve` alone."""
    return {name: one for name, one in frameworks().items() if is_examinable(one)}


def is_examinable(framework: Framework) -> bool:
    """Whether the configs of a framework can be examined."""
    return bool(framework.doctor) or is_readable(framework)


def doctor(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE",
            help="The config file, or several that are merged from left to right. With --verl: none, one, "
            "hydra overrides (key=value, +key=value), or both.",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="The framework of the config: "
            f"{', '.join(one.name for one in OURS if is_examinable(one))}. "
            "Default: from the suffix."
        ),
    ] = None,
    verl: Annotated[bool, typer.Option("--verl", help="Short for --framework verl.")] = False,
    python: Annotated[
        str, typer.Option(help="The interpreter that will train. Default: this one.", show_default=False)
    ] = sys.executable,
    version: Annotated[
        str | None, typer.Option(help="The framework's version, if it is not the installed one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the config of a framework before training.

    PRIME-RL: an rl.toml or a trainer's own config. --python imports PRIME-RL's class of it, if installed.

    verl: a YAML as for `main_ppo --config-dir FOLDER --config-name NAME`, and overrides as for main_ppo;
    with neither, only the environment is examined. --python imports verl and composes the config.

    trl: the options of a YAML, by themselves; TRL has to be installed here.

    Exit status 1: an error was found; 2: there was nothing to examine.
    """
    if verl and framework not in (None, "verl"):
        raise ConfigError("--verl", f"--framework {framework} is given too", "give one of them")
    files, overrides = [Path(one) for one in given or ()], tuple[str, ...]()
    name = framework_of("verl" if verl else framework, files)
    known = examinable()[name]
    if known.has_overrides:
        files, overrides = split(given or ())
    elif not files:
        suffixes = " ".join(known.suffixes)
        raise ConfigError("FILE", f"no config file of {name} is given", f"give one ({suffixes})")
    with foreign_code():
        if known.doctor:
            found = import_module(known.doctor).examine(files, Target(python, version, overrides))
        else:
            found = examine(name, table_given(files, overrides), version)
    if as_json:
        answer(json.dumps(as_data(name, files, overrides, found), indent=2))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        print_findings(console, examined(files, overrides), found)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def table_given(
    files: Sequence[Path],
    overrides: Sequence[str],
    together: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The config of a file with its overrides. Several files are an error, unless they are put `together`."""
    if len(files) > 1 and together is None:
        raise ConfigError("FILE", f"{len(files)} are given", "give one config file")
    tables = [table_of(one) for one in files]
    return replaced(together(tables) if together else next(iter(tables), {}), overrides)


def split(given: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Files, and hydra's overrides: key=value, +key=value, ~key. A file may have = in its path."""
    overrides = tuple(one for one in given if ("=" in one or one.startswith("~")) and not os.path.isfile(one))
    return [Path(one) for one in given if one not in overrides], overrides


def framework_of(framework: str | None, files: Sequence[Path]) -> str:
    """The framework that was named, or else the one whose files have these suffixes."""
    if framework is not None:
        if framework not in examinable():
            raise unknown("--framework", framework, examinable(), noun="framework")
        return framework
    if not files:
        raise ConfigError("FILE", "nothing to examine is given", "give a config file, or --verl")
    for name, known in examinable().items():
        if all(file.suffix in known.suffixes for file in files):
            return name
    suffixes = ", ".join(f"{name}: {' '.join(f.suffixes)}" for name, f in examinable().items() if f.suffixes)
    problem = f"the framework of {', '.join(map(str, files))} is not known by the suffix ({suffixes})"
    raise ConfigError("FILE", problem, "set --framework, or --verl")


def examined(files: Sequence[Path], overrides: Sequence[str]) -> str:
    """What was examined: "a.yaml + 3 overrides"."""
    number = f"{len(overrides)} override{'s' * (len(overrides) > 1)}"
    return " + ".join([*map(str, files), *([number] if overrides else [])]) or "the environment"


def as_data(
    framework: str, files: Sequence[Path], overrides: Sequence[str], found: Examination
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "framework": framework,
        "files": [str(file) for file in files],
        **({"overrides": list(overrides)} if examinable()[framework].has_overrides else {}),
        "against": found.against,
        "findings": [finding._asdict() for finding in found.findings],
    }


def print_findings(console: Console, what: str, found: Examination) -> None:
    """Print each finding, errors first, and how many there are."""
    for finding in sorted(found.findings, key=lambda one: list(STYLES).index(one.severity)):
        head = Text(f"{finding.severity}: ", style=STYLES[finding.severity])
        console.print(head + Text(finding.key, style="bold"), soft_wrap=True)
        console.print(Text(f"  {finding.problem}"), soft_wrap=True)
        console.print(Text(f"  -> {finding.remedy}"), soft_wrap=True)
    console.print(Text(f"{what}: {count(found.findings)}, against {found.against}"), soft_wrap=True)


def count(findings: Sequence[Finding]) -> str:
    """ "1 error, 2 warnings", or "nothing found"."""
    numbers = {severity: sum(one.severity == severity for one in findings) for severity in STYLES}
    return (
        ", ".join(f"{n} {NOUNS[severity][n > 1]}" for severity, n in numbers.items() if n) or "nothing found"
    )
