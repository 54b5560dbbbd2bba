"""What a set of checks found: `Report`, which `check` prints and `check_loss` returns."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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

    def raise_if_failed(self) -> None:
        """Raise AssertionError with every law that does not hold."""
        __tracebackhide__ = True
        if not self.passed:
            raise AssertionError("\n".join(self.lines(only=tuple(FINDINGS))))

    def lines(self, only: Iterable[Status] = (*FINDINGS, "not applicable", "passed")) -> list[str]:
        """The report as plain text: the findings first, and the number of each status."""
        lines = [f"{self.subject}: {self.counts}"]
        for status in only:
            for outcome in self.having(status):
                lines.append(f"  {status}: {outcome.check}")
                lines += [f"    {line}" for text in outcome[2:] for line in text.splitlines()]
        return lines

    @property
    def counts(self) -> str:
        """How many checks have each status."""
        statuses: tuple[Status, ...] = ("passed", *FINDINGS, "not applicable")
        counted = {status: len(self.having(status)) for status in statuses}
        always = ("passed", "failed", "not applicable")
        return ", ".join(f"{n} {status}" for status, n in counted.items() if n or status in always)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_data(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "subject": self.subject,
            "passed": self.passed,
            "sound": self.sound,
            "checks": [outcome._asdict() for outcome in self.outcomes],
        }
