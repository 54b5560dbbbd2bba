"""What was last run of the sessions that CI does not run, for docs/status.md."""

from docs.generator.markdown import table
from parity_tests.rigs.records import SESSIONS, records


def runs() -> str:
    """One row for each run: what it ran on, when, and how many tests passed."""
    rows = []
    for name, recorded in records().items():
        session = SESSIONS[name]
        for run in recorded["runs"]:
            source = f"{session.remote} at {run['commit']}" if "commit" in run else "as installed"
            rows.append((session.title, source, run["date"], str(run["passed"]), str(run["skipped"])))
    return table(("session", "ran on", "on", "tests passed", "skipped"), rows)
