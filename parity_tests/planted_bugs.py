"""Mutation tests: plant one bug at a time in a copy of this repository; its tests must then fail.

`nox -s planted_bugs`, or `python -m parity_tests.planted_bugs [--only WORD]`. A bug is
killed if the named tests fail with it and pass without it. A bug that crashes or hangs proves nothing and
counts as survived.
"""

import argparse
import ast
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

from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.records import SESSIONS, digest, write

LEFT_OUT = (".*", "build", "demo_out", "*.egg-info", "__pycache__")
CRASHES = ("AttributeError", "ImportError", "IndexError", "ModuleNotFoundError", "NameError", "RuntimeError")
CRASHES += ("SyntaxError", "TypeError", "jaxtyping.TypeCheckError")
LIMIT_S = 900  # for the tests of one bug, which may make a loop endless


class Bug(NamedTuple):
    """A wrong edit of one definition, and the tests that must fail with it.

    `place` names the definition: "kernels/kl.py::k2", "FILE::Class::method" or "FILE::CONSTANT". `right` must
    occur exactly once in it; `wrong` replaces it. The tests are below parity_tests/.
    """

    name: str
    place: str
    right: str
    wrong: str
    tests: str

    @property
    def file(self) -> str:
        """The file of the place, from the root of the repository."""
        return self.place.split("::")[0]

    def planted(self, source: str) -> str:
        """The source of the file with the bug in it; ValueError if the place or the text is gone."""
        lines = source.splitlines(keepends=True)
        start, end = definition(source, self.place)
        body = "".join(lines[start:end])
        if (count := body.count(self.right)) != 1:
            raise ValueError(f"{self.place} has this text {count} times, expected once: {self.right!r}")
        return "".join([*lines[:start], body.replace(self.right, self.wrong), *lines[end:]])


class Verdict(NamedTuple):
    """The result for a bug: the first test that failed, or why the bug does not count as killed."""

    bug: Bug
    killer: str | None
    problem: str = ""


def bugs() -> list[Bug]:
    """Read planted_bugs.json. It is JSON so that the linter does not see code that is wrong on purpose."""
    rows = json.loads((Path(__file__).parent / "planted_bugs.json").read_text())
    return [Bug(**row) for row in rows]


def definition(source: str, place: str) -> tuple[int, int]:
    """The first line of a definition, decorators included, counted from 0, and the line after its last."""
    node: ast.AST = ast.parse(source)
    for name in place.split("::")[1:]:
        named = [child for child in ast.iter_child_nodes(node) if name in names(child)]
        if len(named) != 1:
            raise ValueError(f"{place}: {len(named)} definitions of {name}, expected one")
        (node,) = named
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return first - 1, node.end_lineno


def names(node: ast.AST) -> list[str]:
    """What a statement defines: a function, a class, or the variables that it assigns."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def copy(to: Path) -> Path:
    """Copy the working tree without hidden files and build outputs; the links of the package stay links."""
    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT)))


def start(where: Path, tests: str, log: Path, limit: int = LIMIT_S) -> int:
    """Run pytest on a copy in a forked child and return its process id. The child has torch imported."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(limit)  # 0 is none
    os.chdir(where)
    os.environ.update(CI="1", COLUMNS="300")  # the same examples each time; a reason is not cut short
    for name in [name for name in sys.modules if name.partition(".")[0] == "parity_tests"]:
        del sys.modules[name]  # otherwise ROOT is not the copy's, and a program that a test starts has no bug
    sys.path[:] = [str(where), *(path for path in sys.path if path and Path(path) != ROOT)]
    sys.dont_write_bytecode = True  # two edits within a second could not be told apart
    quiet = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported here already
    status = pytest.main([*quiet, *(str(where / "parity_tests" / name) for name in tests.split())])
    sys.stdout.flush()
    os._exit(status)


def plant(bug: Bug, where: Path) -> str:
    """Plant the bug in the copy and return the sound text of its file."""
    path = where / bug.file
    sound = path.read_text()
    path.write_text(bug.planted(sound))
    return sound


def judge(bug: Bug, status: int, output: str) -> Verdict:
    """Judge a bug by the exit status and the output of its tests."""
    if os.WIFSIGNALED(status):
        return Verdict(bug, None, f"ended by signal {os.WTERMSIG(status)}: longer than {LIMIT_S} s?")
    failed = re.search(r"^FAILED parity_tests/(\S+\.py::\w+).*?(?: - (.*))?$", output, re.MULTILINE)
    if os.WEXITSTATUS(status) != 1 or failed is None:
        return Verdict(bug, None, "survived" if status == 0 else output[-300:])
    if (failed[2] or "").startswith(CRASHES):
        return Verdict(bug, None, f"crashes rather than computes something wrong: {failed[2]}")
    return Verdict(bug, failed[1])


def hunt(chosen: list[Bug], copies: list[Path]) -> list[Verdict]:
    """Plant each bug, run its tests and remove it; as many bugs at a time as there are copies."""
    waiting, running, verdicts = list(chosen), {}, {}

    def report(verdict: Verdict) -> None:
        verdicts[verdict.bug] = verdict
        word = "killed" if verdict.killer else "SURVIVED"
        print(f"{word:9}{verdict.bug.name}: {verdict.killer or verdict.problem}", flush=True)

    while waiting or running:
        while waiting and copies:
            bug, where = waiting.pop(0), copies.pop()
            sound, log = plant(bug, where), where.with_suffix(".log")
            running[start(where, bug.tests, log)] = bug, where, sound, log
        if running:
            pid, status = os.wait()
            bug, where, sound, log = running.pop(pid)
            (where / bug.file).write_text(sound)
            copies.append(where)
            report(judge(bug, status, log.read_text()))
    return [verdicts[bug] for bug in chosen]


def main() -> int:
    """Print what kills each bug; status 1 unless every bug is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name, place or tests contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    began, files = monotonic(), digest(SESSIONS["planted_bugs"].covers)
    torch.set_num_threads(1)  # before the first fork
    chosen = [bug for bug in bugs() if options.only in f"{bug.name} {bug.place} {bug.tests}"]
    if not chosen:
        print(f"no bug contains {options.only!r}")
        return 1
    if gone := not_plantable(chosen):
        print(f"{len(gone)} bugs cannot be planted; correct planted_bugs.json:", *gone, sep="\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy(Path(folder, str(i))) for i in range(options.jobs)]
        log = Path(folder, "sound.log")
        every_test = sorted({name for bug in chosen for name in bug.tests.split()})
        start(copies[0], " ".join(every_test), log, limit=0)
        if os.wait()[1] != 0:
            print(f"the tests fail without any bug:\n{log.read_text()[-3000:]}")
            return 1
        verdicts = hunt(chosen, copies)
    killed = sum(verdict.killer is not None for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} planted bugs killed in {monotonic() - began:.0f} s")
    if not options.only:
        write("planted_bugs", files, {"passed": killed, "skipped": len(verdicts) - killed})
    return 0 if killed == len(verdicts) else 1


def not_plantable(chosen: list[Bug]) -> list[str]:
    """One sentence for each bug whose file, definition or text is gone."""
    gone = []
    for bug in chosen:
        try:
            bug.planted((ROOT / bug.file).read_text())
        except (OSError, ValueError) as error:
            gone.append(f"{bug.name}: {error}")
    return gone


if __name__ == "__main__":
    sys.exit(main())
