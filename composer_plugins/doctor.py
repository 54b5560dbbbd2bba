"""What the doctors of all frameworks share: their target and answer, and how to ask an interpreter."""

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError, Finding

TIMEOUT = 300  # seconds for an interpreter to import a loss, and torch with it
# A program that imports a framework spends a third of its time on collecting and freeing what it imported.
QUICK = "import gc, os, sys\ngc.disable()\n{}\nsys.stdout.flush()\nos._exit(0)\n"
ANSWER = "composer-plugins doctor: "  # begins the line of a probe's answer; an import may print as well


class Target(NamedTuple):
    """What a config is for: the interpreter that will train, and the framework's version if it was given."""

    python: str
    version: str | None
    overrides: tuple[str, ...] = ()  # options of the framework's own command line, after its file
    config: str = ""  # the name of a config of the framework's own; "" for its default


class Examination(NamedTuple):
    """The findings, and what the config was compared with."""

    against: str
    findings: tuple[Finding, ...]


def ask(python: str, program: Path, *arguments: str) -> Any:
    """What `program`, a file that needs only the standard library, answers in another interpreter.

    The program is given as `-c`, so it finds modules as `python -m` does: in the working folder too.
    Raises ConfigError when that interpreter cannot be run or gives no answer.
    """

    def error(problem: str) -> ConfigError:
        return ConfigError("--python", f"{python} {problem}", "name the interpreter that will train")

    command = [python, "-c", QUICK.format(program.read_text()), ANSWER, *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, ValueError) as failure:  # ValueError: a NUL character in a name
        raise error(f"cannot be run: {getattr(failure, 'strerror', None) or failure}") from None
    except subprocess.TimeoutExpired:
        raise error(f"gave no answer within {TIMEOUT} seconds") from None
    lines = [line for line in run.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        last = (run.stderr.strip() or "no output").splitlines()[-1]
        raise error(f"is not a Python that answers (status {run.returncode}: {last})")
    return json.loads(lines[-1].removeprefix(ANSWER))
