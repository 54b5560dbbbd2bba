"""`composer-plugins doctor`: what is wrong with a framework's config file, before a GPU hour is spent.

What to look for is each framework's own business: a module of its adapter, loaded when it is asked for, has

    examine(files, target) -> Examination

and never imports the framework. What it needs to know of the interpreter that will train, it asks there.
verl's config is a file, overrides of hydra's, or both: the target has the overrides.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.errors import ConfigError, unknown

Severity = Literal["error", "warning", "info"]

STYLES: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}
WAIT = 300  # seconds for an interpreter to import a loss, and torch with it
ANSWER = "composer-plugins doctor: "  # what begins the line of an answer; an import may print as well


class Finding(NamedTuple):
    """One thing to look at: where, what came and what was wanted, what to do."""

    severity: Severity
    key: str  # as it is written in the file
    what: str
    remedy: str


class Target(NamedTuple):
    """What the file is for: the interpreter that will train, and the framework's version if it was told."""

    python: str
    version: str | None
    overrides: tuple[str, ...] = ()  # options of the framework's own command line, after its file


class Examination(NamedTuple):
    """What was found, and what the file was held against."""

    against: str
    findings: tuple[Finding, ...]


class Framework(NamedTuple):
    """Where the framework's checks are, and how its config files end."""

    module: str
    suffixes: tuple[str, ...]  # those that are no other framework's
    overrides: bool = False  # whether it takes them, or no file at all


FRAMEWORKS = {
    "prime-rl": Framework("composer_plugins.adapters.prime_rl_parts.doctor", (".toml",)),
    "verl": Framework("composer_plugins.adapters.verl_doctor.doctor", (), overrides=True),
}


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
        typer.Option(help=f"Whose config it is: {', '.join(FRAMEWORKS)}. By its suffix if left out."),
    ] = None,
    verl: Annotated[bool, typer.Option("--verl", help="Short for --framework verl.")] = False,
    python: Annotated[
        str, typer.Option(help="The interpreter that will train. This one, if left out.")
    ] = sys.executable,
    version: Annotated[
        str | None, typer.Option(help="The framework's version, where none or another is installed there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Find what is wrong with a framework's config file before a GPU hour is spent.

    PRIME-RL: an rl.toml or a trainer's own config. The framework is not imported.

    verl: a YAML as for `main_ppo --config-dir FOLDER --config-name NAME`, and overrides as for main_ppo;
    with neither, the environment alone. verl is imported, and the config composed, by --python.

    Exit status 1: an error was found; 2: there was nothing to examine.
    """
    if verl and framework not in (None, "verl"):
        raise ConfigError(f"--verl and --framework {framework}: say one of them")
    files, overrides = [Path(one) for one in given or ()], tuple[str, ...]()
    name = choose("verl" if verl else framework, files)
    if FRAMEWORKS[name].overrides:
        files, overrides = split(given or ())
    elif not files:
        raise ConfigError(f"no config file given; wanted {name}'s: {' '.join(FRAMEWORKS[name].suffixes)}")
    found = import_module(FRAMEWORKS[name].module).examine(files, Target(python, version, overrides))
    if as_json:
        typer.echo(json.dumps(as_data(name, files, overrides, found), indent=2))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        print_findings(console, what_was_given(files, overrides), found)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def split(given: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Files and hydra's overrides: key=value, +key=value, ~key. A file may have = in its path."""
    overrides = tuple(one for one in given if ("=" in one or one.startswith("~")) and not os.path.isfile(one))
    return [Path(one) for one in given if one not in overrides], overrides


def choose(framework: str | None, files: Sequence[Path]) -> str:
    """The framework whose files these are."""
    if framework is not None:
        if framework not in FRAMEWORKS:
            raise unknown("framework", framework, FRAMEWORKS)
        return framework
    if not files:
        raise ConfigError("nothing to examine: give a config file, or --verl for verl's environment")
    for name, known in FRAMEWORKS.items():
        if all(file.suffix in known.suffixes for file in files):
            return name
    endings = ", ".join(
        f"{name}: {' '.join(known.suffixes)}" for name, known in FRAMEWORKS.items() if known.suffixes
    )
    raise ConfigError(
        f"{', '.join(map(str, files))}: by its suffix no config that the doctor knows ({endings}); "
        "say whose it is with --framework, or --verl"
    )


def what_was_given(files: Sequence[Path], overrides: Sequence[str]) -> str:
    """ "a.yaml + 3 overrides"."""
    number = f"{len(overrides)} override{'s' * (len(overrides) > 1)}"
    return " + ".join([*map(str, files), *([number] if overrides else [])]) or "the environment"


def as_data(
    framework: str, files: Sequence[Path], overrides: Sequence[str], found: Examination
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "framework": framework,
        "files": [str(file) for file in files],
        **({"overrides": list(overrides)} if FRAMEWORKS[framework].overrides else {}),
        "against": found.against,
        "findings": [finding._asdict() for finding in found.findings],
    }


def print_findings(console: Console, examined: str, found: Examination) -> None:
    """Each finding with its key, errors first; or that there is none."""
    for finding in sorted(found.findings, key=lambda one: list(STYLES).index(one.severity)):
        head = Text(f"{finding.severity}: ", style=STYLES[finding.severity])
        console.print(head + Text(finding.key, style="bold"), soft_wrap=True)
        console.print(Text(f"  {finding.what}"), soft_wrap=True)
        console.print(Text(f"  -> {finding.remedy}"), soft_wrap=True)
    console.print(Text(f"{examined}: {count(found.findings)}, against {found.against}"), soft_wrap=True)


def count(findings: Sequence[Finding]) -> str:
    """ "1 error, 2 warnings", or "nothing found"."""
    numbers = {kind: sum(one.severity == kind for one in findings) for kind in STYLES}
    plural = {"error": "errors", "warning": "warnings", "info": "remarks"}
    single = {"error": "error", "warning": "warning", "info": "remark"}
    parts = [f"{n} {(single if n == 1 else plural)[kind]}" for kind, n in numbers.items() if n]
    return ", ".join(parts) or "nothing found"


def ask(python: str, program: Path, *arguments: str) -> Any:
    """What `program`, a file of the standard library's means, answers in another interpreter.

    It is given as `-c`: modules are found as `python -m` finds them, in the working folder too.
    """
    command = [python, "-c", program.read_text(), ANSWER, *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    except OSError as error:
        raise ConfigError(f"--python {python}: cannot be run: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in a name
        raise ConfigError(f"--python {python}: cannot be asked: {error}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--python {python}: no answer within {WAIT} seconds") from None
    lines = [line for line in run.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        last = (run.stderr.strip() or "no output").splitlines()[-1]
        raise ConfigError(f"--python {python}: no Python that can be asked (status {run.returncode}: {last})")
    return json.loads(lines[-1].removeprefix(ANSWER))
