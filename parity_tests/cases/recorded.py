"""What is said of each mistake: made in the environment of its framework, and recorded in `said/`.

The cases of a framework are data, in `trl.py`, `verl.py` and `prime_rl.py`, and each of these makes one.
`python -m parity_tests.cases.recorded` makes all that this environment can, and writes them down; the tests
`test_mistakes.py` make them again and compare. docs/mistakes.md shows what is recorded.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from composer_plugins.errors import ComposerError
from composer_plugins.findings import ComposerWarning, Finding
from parity_tests.rigs.paths import TESTS

SAID = TESTS / "cases" / "said"
# By module of the cases, the package that they need.
FRAMEWORKS = {"trl": "trl", "verl": "verl", "verl_environment": "", "prime_rl": ""}
SHOWN = 160  # characters of an error that is not ours
Stage = tuple[str, Callable[[], Any]]  # when it runs, and what


class Row(NamedTuple):
    """A mistake, and what is said of it; "" where nothing is."""

    name: str
    change: str  # as a user writes it
    doctor: str
    trainer: str
    when: str
    why: str = ""  # why the trainer says nothing

    @property
    def is_silent(self) -> bool:
        """Whether nobody says anything, or the trainer says nothing and the row does not say why."""
        return not self.trainer and not (self.doctor and self.why)


class Cases(Protocol):
    """A module of cases."""

    CASES: Sequence[Any]

    def row(self, case: Any) -> Row:
        """Make the mistake and write down what is said."""


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
        found = [f"warning: {one.message}" for one in caught if issubclass(one.category, ComposerWarning)]
        found += [in_words(error)] if error is not None else []
        words += [one for one in found if one not in words]
        when = name if found and (error is not None or not when) else when
        if error is not None:
            break
    return "<br>".join(words), when


def in_words(error: Exception) -> str:
    """An error as a row has it: ours by its sentence, any other with its type."""
    if isinstance(error, ComposerError):
        return f"error: {error}"
    text = " ".join(str(error).split())
    text = f"{text[:SHOWN]}..." if len(text) > SHOWN else text
    return text if type(error).__name__ == "Refusal" else f"{type(error).__name__}: {text}"


def findings_in_words(findings: Iterable[Finding]) -> str:
    """What a doctor says."""
    return "<br>".join(f"{one.severity}: {one}" for one in findings)


def replaced(row: Row, names: Mapping[str, str]) -> Row:
    """The row without what differs from machine to machine."""
    for before, after in names.items():
        row = row._replace(
            doctor=row.doctor.replace(before, after), trainer=row.trainer.replace(before, after)
        )
    return row


@cache
def recorded(framework: str) -> dict[str, Row]:
    """The rows of a framework by name, as they were recorded."""
    return {one["name"]: Row(**one) for one in json.loads((SAID / f"{framework}.json").read_text())}


def assert_told(row: Row, framework: str) -> None:
    """Somebody says something, or the row says why not; and it is what was recorded."""
    assert not row.is_silent, f"nothing is said of: {row.name}"
    assert recorded(framework).get(row.name) == row, "python -m parity_tests.cases.recorded writes it down"


def record(cases: Cases, framework: str) -> None:
    """Make all mistakes of one framework and write down what is said."""
    rows = [cases.row(case) for case in cases.CASES]
    lines = ",\n".join(json.dumps(row._asdict(), ensure_ascii=False, indent=1) for row in rows)
    (SAID / f"{framework}.json").write_text(f"[\n{lines}\n]\n")
    silent = [row.name for row in rows if row.is_silent]
    print(f"{framework}: {len(rows)} mistakes; silent: {', '.join(silent) or 'none'}")


if __name__ == "__main__":
    for name, package in FRAMEWORKS.items():
        if not package or find_spec(package):
            record(import_module(f"parity_tests.cases.{name}"), name)
