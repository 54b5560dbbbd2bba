"""docs/mistakes.md: mistakes that users make, what the doctor says of each, what the trainer says, and when.

`python -m docs.generator.mistakes_page` makes every mistake of the frameworks that this environment has, and
writes their sections of the page. The cases are data in `mistakes_trl`, `mistakes_verl` and
`mistakes_prime_rl`; `adapters/*/test_mistakes.py` makes them again and compares what is said with the page.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from composer_plugins.errors import ComposerError
from composer_plugins.findings import ComposerWarning, Finding
from docs.generator.tables import ROOT

PAGE = ROOT / "docs" / "mistakes.md"
# By module of the cases: the package that they need.
FRAMEWORKS = {"trl": "trl", "verl": "verl", "prime_rl": ""}
# An underscore at the edge of a word: Markdown would set the word in italics.
EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
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

    def line(self) -> str:
        """The row in Markdown."""
        trainer = "the same" if self.trainer == self.doctor else self.trainer or self.why
        said = (EMPHASIS.sub(r"\\_", cell) for cell in (self.doctor or "nothing", trainer))
        cells = self.name, f"`{self.change}`", *said, self.when or "never"
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


class Cases(Protocol):
    """A module of cases."""

    NAME: str
    TITLE: str
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


def markers(name: str) -> tuple[str, str]:
    """The comments around a framework's section."""
    return f"<!-- mistakes of {name}: python -m docs.generator.mistakes_page -->", f"<!-- end of {name} -->"


def section(name: str) -> str:
    """A framework's section of the page."""
    start, end = markers(name)
    return PAGE.read_text().split(start)[1].split(end)[0]


def assert_told(row: Row, name: str) -> None:
    """Somebody says something, or the row says why not; and the page has the row."""
    assert not row.is_silent, f"nothing is said of: {row.name}"
    assert row.line() in section(name), "run python -m docs.generator.mistakes_page"


def written(cases: Cases) -> None:
    """Make all mistakes of one framework and put the table into the page."""
    rows = [cases.row(case) for case in cases.CASES]
    silent = [row.name for row in rows if row.is_silent]
    start, end = markers(cases.NAME)
    head = ["| mistake | written as | the doctor | the trainer | when |", "|---|---|---|---|---|"]
    table = "\n".join([cases.TITLE, "", *head, *(row.line() for row in rows)])
    before, rest = PAGE.read_text().split(start)
    PAGE.write_text(f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}")
    print(f"{cases.NAME}: {len(rows)} mistakes; silent: {', '.join(silent) or 'none'}")


def main() -> None:
    """Write the sections of the frameworks that are installed here."""
    for module, package in FRAMEWORKS.items():
        if not package or find_spec(package):
            written(import_module(f"parity_tests.cases.{module}"))


if __name__ == "__main__":
    main()
