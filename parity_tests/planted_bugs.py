"""Proof of power: plants bugs one at a time in a copy of this repository; the suite must kill each.

`nox -s planted_bugs`, or `python -m parity_tests.planted_bugs [--only WORD] [--write]`. A bug is killed if
the named tests fail on it, having passed without it. `--write` puts the table into README.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "parity_tests" / "README.md"
START, END = "<!-- planted bugs -->", "<!-- end of planted bugs -->"
LEFT_OUT = (".git", ".nox", ".venv", ".hypothesis", "build", "demo_out", "*.egg-info", "__pycache__")


class Bug(NamedTuple):
    """An edit of one place, and the tests that must see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


class Verdict(NamedTuple):
    """What became of a bug: the first test that failed, or why it does not count."""

    bug: Bug
    killer: str | None
    problem: str = ""


def bugs() -> list[Bug]:
    """Those of planted_bugs.json, which keeps code that is wrong on purpose out of the linter's sight."""
    rows = json.loads((Path(__file__).parent / "planted_bugs.json").read_text())
    return [Bug(**row) for row in rows]


def copy(to: Path) -> Path:
    """The working tree without what is built or hidden; the links inside the package stay links."""
    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT)))


def run(where: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Pytest on a copy, which comes before the installed package."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    paths = [str(where / "parity_tests" / name) for name in tests.split()]
    env = {**os.environ, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1", "CI": "1"}
    return subprocess.run([*command, *paths], cwd=where, env=env, capture_output=True, text=True)


def judge(bug: Bug, where: Path) -> Verdict:
    """Plant it, run its tests, take it out again."""
    path = where / bug.file
    sound = path.read_text()
    if sound.count(bug.right) != 1:
        return Verdict(bug, None, f"{bug.file} has {sound.count(bug.right)} places like that, wanted 1")
    path.write_text(sound.replace(bug.right, bug.wrong))
    try:
        done = run(where, bug.tests)
    finally:
        path.write_text(sound)
    failed = re.search(r"^FAILED \S*?(test_\w+\.py::\w+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return Verdict(bug, failed[1])
    return Verdict(bug, None, "survived" if done.returncode == 0 else (done.stdout + done.stderr)[-300:])


def main() -> int:
    """Print the table; status 1 unless every bug is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the table into parity_tests/README.md")
    options = parser.parse_args()
    chosen = [bug for bug in bugs() if options.only in bug.name]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            copies.put(copy(Path(folder, str(i))))

        def one(bug: Bug) -> Verdict:
            where = copies.get()
            try:
                verdict = judge(bug, where)
            finally:
                copies.put(where)
            word = "killed" if verdict.killer else "SURVIVED"
            print(f"{word:9}{bug.name}: {verdict.killer or verdict.problem}", flush=True)
            return verdict

        where = copies.get()
        sound = run(where, " ".join(sorted({name for bug in chosen for name in bug.tests.split()})))
        copies.put(where)
        if sound.returncode != 0:
            print(f"the tests fail without any bug:\n{sound.stdout[-2000:]}{sound.stderr[-2000:]}")
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(one, chosen))
    killed = sum(verdict.killer is not None for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} planted bugs killed")
    if options.write and killed == len(verdicts):
        write(verdicts)
    return 0 if killed == len(verdicts) > 0 else 1


def write(verdicts: list[Verdict]) -> None:
    """Replace the table in the README."""
    rows = [f"| {v.bug.name} | `{v.bug.file}` | `{v.killer}` |" for v in verdicts]
    table = "\n".join(["| bug | planted in | killed by |", "|---|---|---|", *rows])
    before, rest = README.read_text().split(START)
    README.write_text(f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    sys.exit(main())
