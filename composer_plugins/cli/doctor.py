"""`composer-plugins doctor`: check the config of a framework before training.

Each adapter knows its framework. Its package `doctor` is imported when it is asked for, and has

    examine(files, target) -> Examination

It never imports the framework here. What it needs to know of the interpreter that will train, it asks there.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli import given as command_line
from composer_plugins.cli.console import answer, foreign_code
from composer_plugins.cli.given import Given
from composer_plugins.doctor import Examination, Target
from composer_plugins.errors import ConfigError, Finding, Severity
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import OURS, frameworks
from composer_plugins.objective.resolve import examine, is_readable, unreadable

STYLES: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}
NOUNS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "remark"}


def examinable() -> dict[str, Framework]:
    """The frameworks whose configs can be examined, by name: by their doctor, or by `resolve` alone."""
    return {name: one for name, one in frameworks().items() if is_examinable(one)}


def is_examinable(framework: Framework) -> bool:
    """Whether the configs of a framework can be examined."""
    return bool(framework.doctor) or is_readable(framework)


def doctor(
    context: typer.Context,
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE|-- WORD",
            help="The config file, or several that are merged from left to right. Options (key=value) "
            "replace theirs. After --: the words of the framework's own command line.",
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

    torchtitan: a config function as module:function, which is called.

    The others: the options of a file or of the command line, by themselves.

    In a launch script, `composer-plugins doctor --framework verl --` stands in the place of the program
    that trains.

    Exit status 1: an error was found; 2: there was nothing to examine.
    """
    if verl and framework not in (None, "verl"):
        raise ConfigError("--verl", f"--framework {framework} is given too", "give one of them")
    name = "verl" if verl else framework
    if name is not None and name not in examinable():
        raise unreadable("--framework", name, examinable())
    config = command_line.read(given or (), name or "", context.obj)
    name = config.framework or framework_of(config.files, config.overrides)
    known = examinable()[name]
    if not (config.files or config.overrides or known.configs):
        suffixes = " ".join(known.suffixes)
        kinds = f" ({suffixes})" if suffixes else ""
        raise ConfigError("FILE", f"no config file of {name} and no option is given", f"give one{kinds}")
    with foreign_code():
        if known.doctor:
            target = Target(python, version, config.overrides, config.config)
            found = import_module(known.doctor).examine(config.files, target)
        else:
            found = examine(name, config._replace(framework=name).table(), version)
    if as_json:
        answer(json.dumps(as_data(name, config, found), indent=2))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        for finding in sorted(found.findings, key=lambda one: list(STYLES).index(one.severity)):
            print_finding(console, finding)
        summary = f"{config.what}: {count(found.findings)}, against {found.against}"
        console.print(Text(summary), soft_wrap=True)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def framework_of(files: Sequence[Path], overrides: Sequence[str]) -> str:
    """The framework whose files have these suffixes."""
    if not (files or overrides):
        raise ConfigError("FILE", "nothing to examine is given", "give a config file, or --verl")
    for name, known in examinable().items():
        if files and all(file.suffix in known.suffixes for file in files):
            return name
    suffixes = ", ".join(f"{name}: {' '.join(f.suffixes)}" for name, f in examinable().items() if f.suffixes)
    named = ", ".join(map(str, files or overrides))
    problem = f"the framework of {named} is not known by the suffix ({suffixes})"
    raise ConfigError("FILE", problem, "set --framework, or --verl")


def as_data(framework: str, given: Given, found: Examination) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "framework": framework,
        "files": [str(file) for file in given.files],
        "overrides": list(given.overrides),
        "against": found.against,
        "findings": [finding._asdict() for finding in found.findings],
    }


def print_finding(console: Console, finding: Finding) -> None:
    """Print the severity and the key of a finding, and below them its problem and its remedy."""
    head = Text(f"{finding.severity}: ", style=STYLES[finding.severity])
    console.print(head + Text(finding.key, style="bold"), soft_wrap=True)
    console.print(Text(f"  {finding.problem}"), soft_wrap=True)
    console.print(Text(f"  -> {finding.remedy}"), soft_wrap=True)


def count(findings: Sequence[Finding]) -> str:
    """ "1 error, 2 warnings", or "nothing found"."""
    numbers = {severity: sum(one.severity == severity for one in findings) for severity in STYLES}
    found = [f"{n} {NOUNS[severity]}{'s' * (n > 1)}" for severity, n in numbers.items() if n]
    return ", ".join(found) or "nothing found"
