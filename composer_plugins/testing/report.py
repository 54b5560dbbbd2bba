"""What a set of checks found: `Report`, which `check` prints and `check_loss` returns."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Status = Literal["passed", "failed", "not applicable"]


class Outcome(NamedTuple):
    """One check on one subject."""

    check: str  # the name of the check: "masked_inputs_have_no_influence"
    status: Status
    detail: str = ""  # failed: the numbers, and where; not applicable: the reason
    cause: str = ""  # failed: what usually causes it, and what to write instead


@dataclass(frozen=True)
class Report:
    """Every check on one loss, or on one trainer."""

    subject: str
    outcomes: tuple[Outcome, ...]

    def having(self, status: Status) -> list[Outcome]:
        """The outcomes with this status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.having("failed")

    def raise_if_failed(self) -> None:
        """Raise AssertionError with every failed check."""
        __tracebackhide__ = True
        if not self.passed:
            raise AssertionError("\n".join(self.lines(only=("failed",))))

    def lines(self, only: Iterable[Status] = ("failed", "not applicable", "passed")) -> list[str]:
        """The report as plain text: the failed checks first, and the number of each status."""
        lines = [f"{self.subject}: {self.counts}"]
        for status in only:
            for outcome in self.having(status):
                lines.append(f"  {status}: {outcome.check}")
                lines += [f"    {line}" for text in outcome[2:] for line in text.splitlines()]
        return lines

    @property
    def counts(self) -> str:
        """How many checks have each status."""
        statuses: tuple[Status, ...] = ("passed", "failed", "not applicable")
        return ", ".join(f"{len(self.having(status))} {status}" for status in statuses)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_data(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "subject": self.subject,
            "passed": self.passed,
            "checks": [outcome._asdict() for outcome in self.outcomes],
        }
