"""Run the claims of the frameworks that are installed here, each on many seeds."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_plugins.conformance.claims import GRADIENT, VALUE, Absent, Claim, Error, Place
from composer_plugins.errors import in_a_line
from composer_plugins.testing.draws import Draw, Refused

Status = Literal[
    "equal", "differs", "could not be run", "not in the catalogue", "not in this version", "not compared"
]
BROKEN: tuple[Status, ...] = ("differs", "could not be run")
CASES = 40
TRIES = 25  # draws for each case that is compared, at most: a claim may refuse most of them


@dataclass(frozen=True)
class Row:
    """One loss of an upstream compared with ours."""

    kind: str  # "" where the catalogue has none
    ours: str
    theirs: str
    status: Status
    cases: int = 0
    errors: dict[str, Error] = field(default_factory=dict)  # by what was compared: the largest
    note: str = ""


@dataclass(frozen=True)
class Suite:
    """What is to be run for one installed version of a framework."""

    version: str
    known: tuple[str, ...]  # the versions on which the claims have been seen to hold
    claims: list[Claim]
    is_there: Callable[[Place], bool]  # whether this version has the loss
    absent: Callable[[], Iterable[Absent]]  # what it has and no claim compares

    @property
    def is_new(self) -> bool:
        """Whether nobody has run the claims on this version yet."""
        return self.version not in self.known


def fits(claim: Claim, names: Collection[str]) -> bool:
    """Whether a claim is about one of these losses or dialects; with none, every claim is."""
    return not names or claim.ours in names or claim.ours.partition("@")[0] in names


def run(suite: Suite, *, cases: int = CASES, only: Iterable[str] = ()) -> Iterator[Row]:
    """Yield a row for each claim, and for each loss of the upstream without one."""
    wanted = set(only)
    logging.disable(logging.INFO)  # each drawn case has other options, and the upstream and we say which act
    try:
        for claim in suite.claims:
            if fits(claim, wanted):
                if suite.is_there(claim.place):
                    yield compared(claim, cases)
                else:
                    yield Row(claim.kind, claim.ours, claim.theirs, "not in this version")
    finally:
        logging.disable(logging.NOTSET)
    for theirs, reason, missing in suite.absent() if not wanted else ():
        yield Row("", "", theirs, "not in the catalogue" if missing else "not compared", note=reason)


def compared(claim: Claim, cases: int) -> Row:
    """Compare a claim on so many cases; a seed stands for a case."""
    largest, count, wrong = dict[str, Error](), 0, ""
    row: dict[str, Any] = {"kind": claim.kind, "ours": claim.ours, "theirs": claim.theirs}
    for seed in range(TRIES * cases):
        if count == cases:
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of options drawn at random, ours and the upstream's
                found = [(x.what, x.error) for x in claim.compare(Draw(seed))]
        except Refused:
            continue
        except (Exception, SystemExit) as error:  # whatever the upstream's own code raises
            note = f"seed {seed}: {in_a_line(error)}"
            return Row(**row, status="could not be run", cases=count, errors=largest, note=note[:300])
        count += 1
        for what, one in found:
            if one.found > one.allowed and not wrong:
                wrong = f"seed {seed}: {what} off by {one.found:.1e}, rounding explains {one.allowed:.1e}"
            if what not in largest or one.found > largest[what].found:
                largest[what] = one
    if not count:
        return Row(**row, status="could not be run", note="no case could be drawn")
    return Row(
        **row, status="differs" if wrong else "equal", cases=count, errors=largest, note=wrong or claim.note
    )


def shown(row: Row, what: str) -> str:
    """An error for a table: "0", "1.2e-16", or nothing where it was not compared."""
    error = row.errors.get(what)
    return "" if error is None else f"{error.found:.1e}" if error.found else "0"


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text, the result and the note last."""
    return row.kind, row.ours, row.theirs, shown(row, VALUE), shown(row, GRADIENT), row.status, row.note
