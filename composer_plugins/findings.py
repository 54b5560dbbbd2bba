"""`Finding`: one type for what a doctor reports, a trainer raises or warns of, and a test sees."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from composer_plugins.errors import ComposerError, ConfigError

Severity = Literal["error", "warning", "info"]


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
        """The finding with its key below `prefix`, if any: "policy" becomes "algorithm.composer.policy"."""
        return self._replace(key=f"{prefix}.{self.key}") if prefix else self

    def without(self, prefix: str) -> "Finding":
        """The same finding with its key from below `prefix`: the inverse of `under`."""
        return self._replace(key=self.key.removeprefix(f"{prefix}."))


class Findings(list[Finding]):
    """What several checks find, in their order: an error of one does not keep the next from running."""

    @contextmanager
    def collected(self, prefix: str = "") -> Iterator[None]:
        """Add the ConfigError that the block raises, with its key below `prefix`, in place of raising it."""
        try:
            yield
        except ConfigError as error:
            self += Finding.all_from(error.under(prefix))

    @property
    def errors(self) -> list[Finding]:
        """The findings that have to be corrected."""
        return [one for one in self if one.severity == "error"]

    def refuse(self) -> None:
        """Raise one ConfigError with all errors, if there are any; a warning is left to who reads on."""
        if self.errors:
            raise error_of(self.errors)


def enforce(findings: Iterable[Finding]) -> None:
    """Warn of each warning up to the first error, and raise one ConfigError with the first error of each key.

    Remarks are for the doctor only.
    """
    wrong = list[Finding]()
    for finding in findings:
        wrong += [finding] if finding.severity == "error" else []
        if finding.severity == "warning" and not wrong:
            warnings.warn(str(finding), ComposerWarning, stacklevel=3)
    if wrong:
        raise error_of(wrong)


def error_of(findings: Iterable[Finding]) -> ConfigError:
    """One error with all of these: the first of each key, the others behind the first."""
    by_key = dict[str, ConfigError]()
    for one in findings:
        by_key.setdefault(one.key, ConfigError(one.key, one.problem, one.remedy))
    first, *others = by_key.values()
    first.others = tuple(others)
    return first
