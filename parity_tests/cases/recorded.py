"""Which error or warning each mistake gives, at which key and when: recorded in `said/`, and no message.

The cases of a framework are data, in `trl.py`, `verl.py` and `prime_rl.py`, and each of these makes one.
`python -m parity_tests.cases.recorded` makes all that this environment can, and writes them down; the tests
`test_mistakes.py` make them again and compare.
"""

import json
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from composer_plugins.errors import ComposerError, ComposerWarning, Finding
from parity_tests.rigs.paths import TESTS

SAID = TESTS / "cases" / "said"
# By module of the cases, the package that they need.
FRAMEWORKS = {"trl": "trl", "verl": "verl", "prime_rl": ""}
Stage = tuple[str, Callable[[], Any]]  # when it runs, and what


class Row(NamedTuple):
    """A mistake, and what is said of it, "error KEY, warning KEY"; "" where nothing is."""

    name: str
    doctor: str
    trainer: str
    when: str
    may_be_silent: bool = False  # whether the trainer cannot know of it

    @property
    def is_silent(self) -> bool:
        """Whether nobody says anything, or a trainer that could know says nothing."""
        return not self.trainer and not (self.doctor and self.may_be_silent)


def said(stages: Iterable[Stage]) -> tuple[str, str]:
    """Run the stages until one raises: what they say, and the stage of the error or of the first warning."""
    words, when = list[str](), ""
    for name, call in stages:
        error: Exception | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as raised:
                error = raised
        texts = (str(one.message) for one in caught if issubclass(one.category, ComposerWarning))
        found = [f"warning {text.partition(': ')[0]}" for text in texts]
        found += [in_words(error)] if error is not None else []
        words += [one for one in found if one not in words]
        when = name if found and (error is not None or not when) else when
        if error is not None:
            break
    return ", ".join(words), when


def in_words(error: Exception) -> str:
    """An error as a row has it: each of ours by its key, any other by its type."""
    if isinstance(error, ComposerError):
        return ", ".join(f"error {one.key}" for one in (error, *error.others))
    return type(error).__name__


def findings_in_words(findings: Iterable[Finding]) -> str:
    """What a doctor says."""
    return ", ".join(f"{one.severity} {one.key}" for one in findings)


@cache
def recorded(framework: str) -> dict[str, Row]:
    """The rows of a framework by name, as they were recorded."""
    found: dict[str, list[str]] = json.loads((SAID / f"{framework}.json").read_text())
    return {name: Row(name, *said) for name, said in found.items()}


def assert_told(row: Row, framework: str) -> None:
    """Somebody says something, and it is what was recorded."""
    assert not row.is_silent, f"nothing is said of: {row.name}"
    found = recorded(framework).get(row.name)
    assert found == row._replace(may_be_silent=False), "python -m parity_tests.cases.recorded writes it down"


def record(cases: ModuleType, framework: str) -> None:
    """Make all mistakes of one framework and write down what is said."""
    rows = [cases.row(case) for case in cases.CASES]
    lines = ",\n".join(f"{json.dumps(row.name)}: {json.dumps(row[1:-1])}" for row in rows)
    (SAID / f"{framework}.json").write_text(f"{{\n{lines}\n}}\n")
    silent = [row.name for row in rows if row.is_silent]
    print(f"{framework}: {len(rows)} mistakes; silent: {', '.join(silent) or 'none'}")


if __name__ == "__main__":
    for name, package in FRAMEWORKS.items():
        if not package or find_spec(package):
            record(import_module(f"parity_tests.cases.{name}"), name)
