"""What a set of checks found: `Report`, which `check` prints and `check_loss` returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

MANY = 4  # laws that do not apply for one reason; of more, only the first is named

Finding = Literal["failed", "unsafe", "untraceable"]
Status = Literal["passed", "failed", "unsafe", "untraceable", "not applicable"]
# What a law that does not hold says of a loss.
FINDINGS: dict[Finding, str] = {
    "failed": "The numbers are wrong, or the loss cannot be used.",
    "unsafe": "With the inputs or the option that the law names, such as NaN at a masked token, the numbers "
    "are wrong, or there are none. With ordinary inputs this law holds.",
    "untraceable": "The numbers are right. The loss cannot be traced, compiled or vectorised.",
}


class Outcome(NamedTuple):
    """One check on one subject."""

    check: str  # the name of the check: "masked_inputs_have_no_influence"
    status: Status
    detail: str = ""  # of a finding: the numbers, and where; not applicable: the reason
    cause: str = ""  # of a finding: what usually causes it, and what to write instead


@dataclass(frozen=True)
class Report:
    """Every check on one loss."""

    subject: str
    outcomes: tuple[Outcome, ...]

    def having(self, *statuses: Status) -> list[Outcome]:
        """The outcomes with these statuses, in the order of the statuses."""
        return [outcome for one in statuses for outcome in self.outcomes if outcome.status == one]

    @property
    def findings(self) -> list[Outcome]:
        """The outcomes of the laws that do not hold: wrong numbers first."""
        return self.having(*FINDINGS)

    @property
    def passed(self) -> bool:
        """Whether every law holds that applies."""
        return not self.findings

    @property
    def sound(self) -> bool:
        """Whether the numbers are right with ordinary inputs."""
        return not self.having("failed")

    def lines(self, verbose: bool = False) -> Iterator[tuple[str, str]]:
        """Each line of the report with its status or style; with `verbose` the laws that hold, too."""
        yield f"{self.subject}: {self.counts}", "bold"
        inapplicable = self.having("not applicable")
        reasons = [outcome.detail for outcome in inapplicable]
        inapplicable.sort(key=lambda outcome: reasons.index(outcome.detail))  # a reason is said once
        shown = [*self.findings, *inapplicable, *(self.having("passed") if verbose else ())]
        for _, same in groupby(shown, key=lambda one: one[1:] if one.status == "not applicable" else one):
            alike = [*same]
            names = [outcome.check for outcome in alike]
            if len(names) > MANY and not verbose:
                names = [f"{names[0]} and {len(names) - 1} more"]
            status, detail, cause = alike[0][1:]
            yield from ((f"  {status}: {name}", status) for name in names)
            yield from ((f"    {line}", "") for text in (detail, cause) for line in text.splitlines())
        for finding, meaning in FINDINGS.items():
            if finding != "failed" and self.having(finding):
                yield f"  {finding}: {meaning}", "dim"

    @property
    def counts(self) -> str:
        """How many checks have each status."""
        statuses: tuple[Status, ...] = ("passed", *FINDINGS, "not applicable")
        counted = {status: len(self.having(status)) for status in statuses}
        always = ("passed", "failed", "not applicable")
        return ", ".join(f"{n} {status}" for status, n in counted.items() if n or status in always)

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())

    def as_data(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "subject": self.subject,
            "passed": self.passed,
            "sound": self.sound,
            "checks": [outcome._asdict() for outcome in self.outcomes],
        }
