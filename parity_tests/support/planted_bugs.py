"""Proof of power: plants bugs one at a time in a copy of this repository; the suite must kill each.

`nox -s planted_bugs`, or `python -m parity_tests.support.planted_bugs [--only WORD] [--write]`. A bug is
killed if the named tests fail on it, having passed without it. One that crashes, or that hangs, proves
nothing and counts as survived. `--write` puts the table into README.md.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import hypothesis  # noqa: F401  these four, imported once, are in every child from the start
import jaxtyping  # noqa: F401
import pytest
import torch

from parity_tests.support.paths import ROOT, TESTS

README = TESTS / "README.md"
START, END = "<!-- planted bugs -->", "<!-- end of planted bugs -->"
LEFT_OUT = (".*", "build", "demo_out", "*.egg-info", "__pycache__")
CRASHES = ("AttributeError", "ImportError", "IndexError", "ModuleNotFoundError", "NameError", "RuntimeError")
CRASHES += ("SyntaxError", "TypeError", "jaxtyping.TypeCheckError")
LIMIT_S = 120  # of one run, of which a bug may have made an endless one


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


def start(where: Path, tests: str, log: Path) -> int:
    """Pytest on a copy, in a child; its process id. Torch is imported here already: a bug takes a second."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(LIMIT_S)
    os.chdir(where)
    os.environ.update(CI="1", COLUMNS="300")  # the same examples each time; a reason is not cut short
    sys.modules.pop("parity_tests", None)
    sys.path[:] = [str(where), *(path for path in sys.path if path and Path(path) != ROOT)]
    sys.dont_write_bytecode = True  # two edits within a second could not be told apart
    quiet = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported here already
    status = pytest.main([*quiet, *(str(where / "parity_tests" / name) for name in tests.split())])
    sys.stdout.flush()
    os._exit(status)


def plant(bug: Bug, where: Path) -> str:
    """Edit the copy; the text to put back. Raises ValueError unless there is just one such place."""
    path = where / bug.file
    sound = path.read_text()
    if sound.count(bug.right) != 1:
        raise ValueError(f"{bug.file} has {sound.count(bug.right)} places like that, wanted 1")
    path.write_text(sound.replace(bug.right, bug.wrong))
    return sound


def judge(bug: Bug, status: int, output: str) -> Verdict:
    """What a child's exit and its output say of the bug it had."""
    if os.WIFSIGNALED(status):
        return Verdict(bug, None, f"ended by signal {os.WTERMSIG(status)}: longer than {LIMIT_S} s?")
    failed = re.search(r"^FAILED parity_tests/(\S+\.py::\w+).*?(?: - (.*))?$", output, re.MULTILINE)
    if os.WEXITSTATUS(status) != 1 or failed is None:
        return Verdict(bug, None, "survived" if status == 0 else output[-300:])
    if (failed[2] or "").startswith(CRASHES):
        return Verdict(bug, None, f"crashes rather than computes something wrong: {failed[2]}")
    return Verdict(bug, failed[1])


def hunt(chosen: list[Bug], copies: list[Path]) -> list[Verdict]:
    """Plant each bug, run its tests, take it out again; as many at a time as there are copies."""
    waiting, running, verdicts = list(chosen), {}, {}

    def report(verdict: Verdict) -> None:
        verdicts[verdict.bug] = verdict
        word = "killed" if verdict.killer else "SURVIVED"
        print(f"{word:9}{verdict.bug.name}: {verdict.killer or verdict.problem}", flush=True)

    while waiting or running:
        while waiting and copies:
            bug = waiting.pop(0)
            try:
                sound = plant(bug, copies[-1])
            except ValueError as error:
                report(Verdict(bug, None, str(error)))
                continue
            where = copies.pop()
            log = where.with_suffix(".log")
            running[start(where, bug.tests, log)] = bug, where, sound, log
        if running:
            pid, status = os.wait()
            bug, where, sound, log = running.pop(pid)
            (where / bug.file).write_text(sound)
            copies.append(where)
            report(judge(bug, status, log.read_text()))
    return [verdicts[bug] for bug in chosen]


def main() -> int:
    """Print the table; status 1 unless every bug is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name, file or tests contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the table into parity_tests/README.md")
    options = parser.parse_args()
    began = monotonic()
    torch.set_num_threads(1)  # before the first fork
    chosen = [bug for bug in bugs() if options.only in f"{bug.name} {bug.file} {bug.tests}"]
    if not chosen:
        print(f"no bug contains {options.only!r}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy(Path(folder, str(i))) for i in range(options.jobs)]
        log = Path(folder, "sound.log")
        start(copies[0], " ".join(sorted({name for bug in chosen for name in bug.tests.split()})), log)
        if os.wait()[1] != 0:
            print(f"the tests fail without any bug:\n{log.read_text()[-3000:]}")
            return 1
        verdicts = hunt(chosen, copies)
    killed = sum(verdict.killer is not None for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} planted bugs killed in {monotonic() - began:.0f} s")
    if options.write and not options.only and killed == len(verdicts):
        write(verdicts)
    return 0 if killed == len(verdicts) else 1


def write(verdicts: list[Verdict]) -> None:
    """Replace the table in the README."""
    rows = [f"| {v.bug.name} | `{v.bug.file}` | `{v.killer}` |" for v in verdicts]
    table = "\n".join(["| bug | planted in | killed by |", "|---|---|---|", *rows])
    before, rest = README.read_text().split(START)
    README.write_text(f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    sys.exit(main())
