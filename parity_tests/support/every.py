"""Run one check over every loss of a kind, in every setting, except for losses that are named with a reason.

An exception that is no longer needed fails: the check must fail for the loss that it names.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from composer_plugins.catalogue import Kind, Loss
from composer_plugins.plugins import losses
from composer_plugins.testing.settings import Setting, settings

Check = Callable[[Setting], None]
Exceptions = Mapping[str, str]  # "policy-kl_cov": "the reason"


def rows(*kinds: Kind) -> list[Loss]:
    """The rows of the catalogue of these kinds, or all rows."""
    return [loss for loss in losses() if not kinds or loss.kind in kinds]


def row_id(row: Loss) -> str:
    """The test id of a row: "policy-grpo"."""
    return f"{row.kind}-{row.name}"


def each(*kinds: Kind) -> Any:
    """Parametrize a test by `row`, over every row of these kinds."""
    return pytest.mark.parametrize("row", rows(*kinds), ids=row_id)


def holds(row: Loss, check: Check, exceptions: Exceptions | None = None) -> None:
    """Assert that `check` passes for every setting of a row, except for the settings that are named.

    A named setting ("advantage-grpo(scale='batch')") must fail. Of a named row one setting must fail.
    """
    __tracebackhide__ = True
    named = set(exceptions or ())
    broken: dict[str, Exception] = {}
    for setting in settings(row):
        try:
            check(setting)
        except Exception as error:
            broken[f"{row.kind}-{setting.label}"] = error
    if row_id(row) in named:  # the label of the first setting too: so the row as a whole
        assert broken, f"{row_id(row)} passes this check: remove it from the exceptions"
        return
    kept = {f"{row.kind}-{setting.label}" for setting in settings(row)} & named - set(broken)
    assert not kept, f"{', '.join(sorted(kept))} pass this check: remove the exception"
    unexpected = {label: error for label, error in broken.items() if label not in named}
    if unexpected:
        lines = [f"{label}: {type(e).__name__}: {str(e)[:900]}" for label, e in unexpected.items()]
        raise AssertionError("\n".join(lines)) from next(iter(unexpected.values()))


def stale(exceptions: Iterable[Exceptions]) -> set[str]:
    """Names in the exceptions that no row and no setting has."""
    known = {f"{row.kind}-{setting.label}" for row in rows() for setting in settings(row)}
    return {name for each in exceptions for name in each} - known
