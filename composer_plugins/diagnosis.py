"""`Finding`: one type for what a doctor reports, a trainer raises or warns of, and a test sees."""

import json
import logging
import subprocess
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer_plugins.errors import ComposerError, ConfigError, raise_all

Severity = Literal["error", "warning", "info"]

TIMEOUT = 300  # seconds for an interpreter to import a loss, and torch with it
# A program that imports a framework spends a third of its time on collecting and freeing what it imported.
QUICK = "import gc, os, sys\ngc.disable()\n{}\nsys.stdout.flush()\nos._exit(0)\n"
ANSWER = "composer-plugins doctor: "  # begins the line of a probe's answer; an import may print as well


class ComposerWarning(UserWarning):
    """An option or a row of data whose effect is probably not what the user intended."""


class Finding(NamedTuple):
    """One thing to look at: the key it concerns, the problem, and the remedy."""

    severity: Severity
    key: str  # as it is written in the config
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"

    @classmethod
    def from_error(cls, error: ComposerError) -> "Finding":
        """An error as a doctor reports it."""
        return cls("error", error.key, error.problem, error.remedy)

    @classmethod
    def all_from(cls, error: ComposerError) -> "list[Finding]":
        """An error and what was found at the same time, as a doctor reports them."""
        return [cls.from_error(one) for one in (error, *error.others)]

    def under(self, prefix: str) -> "Finding":
        """The same finding with its key below `prefix`: "policy" becomes "algorithm.composer.policy"."""
        return self._replace(key=f"{prefix}.{self.key}")

    def without(self, prefix: str) -> "Finding":
        """The same finding with its key from below `prefix`: the inverse of `under`."""
        return self._replace(key=self.key.removeprefix(f"{prefix}."))


def enforce(findings: Iterable[Finding]) -> None:
    """Warn of each warning up to the first error, and raise one ConfigError with all errors.

    Remarks are for the doctor only.
    """
    wrong = list[ConfigError]()
    for finding in findings:
        if finding.severity == "error":
            wrong.append(ConfigError(finding.key, finding.problem, finding.remedy))
        if finding.severity == "warning" and not wrong:
            warnings.warn(str(finding), ComposerWarning, stacklevel=3)
    raise_all(wrong)


def log_info(line: str) -> None:
    """Log `line` at INFO. Where nobody has configured logging, do so: Python would not show the line."""
    logger = logging.getLogger("composer_plugins")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(line)


class Target(NamedTuple):
    """What a config is for: the interpreter that will train, and the framework's version if it was given."""

    python: str
    version: str | None
    overrides: tuple[str, ...] = ()  # options of the framework's own command line, after its file


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
    except OSError as failure:
        raise error(f"cannot be run: {failure.strerror or failure}") from None
    except ValueError as failure:  # a NUL character in a name
        raise error(f"cannot be run: {failure}") from None
    except subprocess.TimeoutExpired:
        raise error(f"gave no answer within {TIMEOUT} seconds") from None
    lines = [line for line in run.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        last = (run.stderr.strip() or "no output").splitlines()[-1]
        raise error(f"is not a Python that answers (status {run.returncode}: {last})")
    return json.loads(lines[-1].removeprefix(ANSWER))
