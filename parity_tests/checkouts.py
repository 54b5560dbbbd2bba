"""Run the sessions that CI cannot run, and record what they ran on: `make checkouts`.

`python -m parity_tests.checkouts PRIME_RL=DIR:DIR NEMO_RL=DIR SLIME=DIR SKYRL=DIR axolotl` runs each session,
of a framework on each of these checkouts. A session that fails is not recorded. `nox -s planted_bugs`
records itself.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from composer_plugins.conformance.stubs import commit_of
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.records import CHECKOUTS, SESSIONS, digest, write

AXOLOTL = "axolotl"  # needs no checkout, but gigabytes of packages
NAMES = {session.variable: name for name, session in CHECKOUTS.items()}


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, one session after the other. Returns 1 if any has failed."""
    asked = [
        (NAMES.get(name, name), sources) for name, _, sources in (one.partition("=") for one in arguments)
    ]
    if not asked or any(
        (name in CHECKOUTS) != bool(sources) or name not in (*CHECKOUTS, AXOLOTL) for name, sources in asked
    ):
        print(f"usage: make checkouts {' '.join(f'[{name}=DIR]' for name in NAMES)}, or {AXOLOTL}")
        return 2
    return max([_run_and_record(name, sources.split(":")) for name, sources in asked])


def _run_and_record(name: str, sources: Sequence[str]) -> int:
    covers, runs = SESSIONS[name].covers, list[dict[str, Any]]()
    files = digest(covers)
    for source in sources:
        with tempfile.TemporaryDirectory() as folder:
            given = ["--source", str(Path(source).resolve())] if source else []
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "nox", "-s", name, "--", *given, f"--junitxml={report}"]
            if subprocess.run(command, cwd=ROOT).returncode:
                print(f"{name} {source}: not recorded, because the session failed")
                return 1
            runs.append(({"commit": commit_of(Path(source))} if source else {}) | counts(report))
    if digest(covers) != files:
        print(f"{name}: not recorded, because its files have changed while it ran")
        return 1
    write(name, files, *runs)
    print(f"{name}: recorded {runs}")
    return 0


def counts(report: Path) -> dict[str, int]:
    """How many tests a report of pytest has, by their outcome."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    total, skipped = (sum(int(one.get(key, 0)) for one in suites) for key in ("tests", "skipped"))
    return {"passed": total - skipped, "skipped": skipped}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
