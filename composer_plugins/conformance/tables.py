"""The results of `composer-plugins conform` as JSON and as Markdown."""

import math
from collections import Counter
from typing import Any

from composer_plugins.conformance.running import Row, Suite, cells

HEADINGS = ("kind", "loss", "its own", "value", "gradient", "result", "")
NUMBERS = ("value", "gradient")
EXPLAINED = (
    "An error is the largest difference over all cases, relative to the largest term of the sum behind the "
    "number (of preference losses: to the loss or 1, to the gradient or beta). Equal means: no larger than "
    "rounding explains, in the precision that the framework computes in."
)


def title(name: str, suite: Suite) -> str:
    """The framework with its version, and whether the claims have been run on it before."""
    if not suite.is_new:
        return f"{name} {suite.version}"
    return f"{name} {suite.version} (new: these comparisons were last run on {', '.join(suite.known)})"


def count(rows: list[Row]) -> str:
    """How many rows have each result: "81 equal, 2 not in the catalogue"."""
    return ", ".join(f"{n} {status}" for status, n in Counter(row.status for row in rows).items())


def markdown(name: str, suite: Suite, rows: list[Row]) -> str:
    """One table with a line before it."""
    cases = max((row.cases for row in rows), default=0)
    lines = [f"{title(name, suite)}, {cases} random cases for each loss: {count(rows)}.", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |" for row in rows]
    return "\n".join(lines)


def as_data(name: str, suite: Suite, rows: list[Row]) -> dict[str, Any]:
    """The results for JSON."""
    return {
        "framework": name,
        "version": suite.version,
        "known_versions": list(suite.known),
        "new": suite.is_new,
        "rows": [
            {
                "kind": row.kind or None,
                "loss": row.ours or None,
                "upstream": row.theirs,
                "status": row.status,
                "cases": row.cases,
                "errors": {
                    what: {name: _number(x) for name, x in error._asdict().items()}
                    for what, error in row.errors.items()
                },
                "note": row.note,
            }
            for row in rows
        ],
    }


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)  # JSON has no infinity
