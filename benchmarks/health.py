"""Real runs with one fault each, and sound ones: which warning of docs/health.md comes, and when.

    python -m benchmarks.health trl [--write] [--only WORDS]     (.nox/trl)
    python -m benchmarks.health verl [--write] [--only WORDS]    (.nox/verl)

The status is 1 where a fault is not told under its metric, or a sound run is warned.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from docs.generator.markdown import table
from docs.generator.written import END, ROOT

PAGE, HEALTH = ROOT / "docs" / "health.md", "composer/health/"
COLUMNS = "cause", "metric", "first number", "step", "message"


class Seen(NamedTuple):
    """A run: its warnings, each with the step at which it came, and what was logged at each step."""

    told: list[tuple[int, str]]
    logged: list[dict[str, Any]]

    def first(self, metric: str) -> str:
        """The value of the metric at the first step that has it, if it is logged."""
        values = [x for line in self.logged for name, x in line.items() if name.endswith(HEALTH + metric)]
        return f"{values[0]:.3g}" if values else ""


class Case(NamedTuple):
    """A run: its cause and the metric under which it is to be told, or "" for a sound one."""

    cause: str
    metric: str
    run: Callable[[], Seen]


def described(case: Case) -> tuple[bool, str]:
    """Make a run and print its warnings; return whether they are right, and the row of a fault."""
    start = time.monotonic()
    try:
        seen = case.run()
    except Exception as error:
        print(f"WRONG: {case.cause} ended with {error!r}", flush=True)
        return False, ""
    told = [(step, text) for step, text in seen.told if text.startswith(HEALTH)]
    found = [one for one in told if one[1].startswith(f"{HEALTH}{case.metric}: ")]
    is_right = bool(found) if case.metric else not told
    print(f"{'' if is_right else 'WRONG: '}{case.cause}, {time.monotonic() - start:.0f} s", flush=True)
    for step, text in seen.told:
        print(f"    step {step}: {text}", flush=True)
    if not (case.metric and found):
        return is_right, ""
    step, text = found[0]
    message = text.partition(": ")[2].partition("; ")[0]
    cells = (case.cause, f"`{case.metric}`", seen.first(case.metric), str(step), message)
    return is_right, table(COLUMNS, [cells]).splitlines()[-1]


def write(framework: str, rows: list[str]) -> None:
    """Put the rows into the framework's table in docs/health.md, each in place of that of its cause."""
    page, start = PAGE.read_text(), f"<!-- table: seen in {framework} -->\n"
    before, _, rest = page.partition(start)
    there, _, after = rest.partition(END)
    lines = {line.split("|")[1]: line for line in [*there.splitlines()[2:], *rows]}
    head = table(COLUMNS, []).splitlines()[:2]
    PAGE.write_text("\n".join([f"{before}{start}{head[0]}", head[1], *lines.values(), f"{END}{after}"]))


def main() -> int:
    """Make the runs of a framework, print the table, and return the exit status."""
    asked = argparse.ArgumentParser()
    asked.add_argument("framework", choices=("trl", "verl"))
    asked.add_argument("--write", action="store_true")
    asked.add_argument("--only", default="", help="the causes that have these words")
    given = asked.parse_args()
    runs: Any = import_module(f"benchmarks.health_{given.framework}")
    cases = [case for case in (*runs.faults(), *runs.sound()) if re.search(given.only, case.cause)]
    found = [described(case) for case in cases]
    rows = [row for _, row in found if row]
    faults = sum(bool(case.metric) for case in cases)
    silent = sum(is_right for case, (is_right, _) in zip(cases, found, strict=True) if not case.metric)
    print("\n".join(rows))
    print(
        f"{len(rows)} of {faults} faults told, {silent} of {len(cases) - faults} sound runs without a warning"
    )
    if given.write:
        write({"trl": "TRL"}.get(given.framework, given.framework), rows)
    return 0 if all(is_right for is_right, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
