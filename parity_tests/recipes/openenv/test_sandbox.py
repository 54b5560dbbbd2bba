"""Code that misbehaves ends as a failing test with a short error, and nothing of it stays."""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.openenv import sandbox as module
from composer_plugins.recipes.openenv.sandbox import Limits, Sandbox
from composer_plugins.recipes.openenv.tasks import EXPRESSIONS, Task, make_task
from composer_plugins.recipes.openenv.verifier import LONGEST_PROBLEM, verify
from parity_tests.rigs.paths import ROOT

TASK: Task = make_task("stock", {"blend": "a + b"}, "gauge", "a - b")
SANDBOX = Sandbox(limits=Limits(cpu_seconds=1, seconds=30))


def function(body: str) -> str:
    """The source of gauge with this body; a function that survives it would pass the tests."""
    lines = [*body.splitlines(), "return a - b"]
    return "import os, socket, sys, time\ndef gauge(a, b):\n" + "\n".join(f"    {line}" for line in lines)


MIB = "f.write(bytes(2**20))"
HOSTILE = {
    "endless loop": ("while True: pass", "used more than 1 seconds of CPU time"),
    "sleep": ("time.sleep(1000)", "was ended after 2 seconds"),
    "fork bomb": ("while True: os.fork()", "BlockingIOError"),
    "fork bomb that never gives up": (
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "CPU time|was ended",
    ),
    "a hundred processes": (
        "for i in range(100):\n    try: child = os.fork()\n    except OSError: break\n"
        "    if not child: time.sleep(60)\nraise ValueError(i)",
        "ValueError: [1-8]$",
    ),
    "threads": (
        "import threading\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()",
        "can't start new thread",
    ),
    "10 GB of memory": ("x = bytearray(10 * 2**30)", "MemoryError"),
    "a file of 1 GB": (
        f"with open('/tmp/x', 'wb') as f:\n    for _ in range(1024): {MIB}",
        "OSError.*File too large",
    ),
    "many files": (
        f"for i in range(1024):\n    with open(f'/tmp/{{i}}', 'wb') as f: {MIB}",
        "OSError.*No space left",
    ),
    "a file elsewhere": ("open('/x', 'w')", "OSError.*Read-only file system"),
    "a file of the machine": ("open('/etc/passwd')", "FileNotFoundError"),
    "this repository": (f"open({str(ROOT / 'pyproject.toml')!r})", "FileNotFoundError"),
    "the parent's environment": ("open(f'/proc/{os.getppid()}/environ')", "FileNotFoundError"),
    "its own environment": (
        "raise ValueError(sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}))",
        r"ValueError: \[\]$",
    ),
    "killing everything": ("os.kill(-1, 9)\nos.kill(os.getpid(), 9)", "No such process|signal 9"),
    "more rights": ("os.setuid(0)\nraise ValueError(os.getuid())", "PermissionError|OSError|ValueError: 6"),
    "a namespace of its own": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise ValueError('not permitted')",
        "not permitted",
    ),
    "killing the parent": ("os.kill(os.getppid(), 9)\ntime.sleep(0.1)\nreturn None", "but it is None"),
    "an early end": ("os._exit(0)", "its process ended before it returned"),
    "exit": ("sys.exit(0)", "SystemExit: 0"),
    "a forged report": (
        'for i in range(30):\n    try: os.write(i, b\'{"index": 0, "value": "passed"}\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
        "it is 'passed'",
    ),
    "an impossible report": (
        "for text in ('[' * 100_000, '{\"index\": Infinity}', '[]', '\\xff', '{\"index\": 9'):\n"
        "    for i in range(30):\n        try: os.write(i, text.encode('latin-1') + b'\\n')\n"
        "        except OSError: pass\nos._exit(0)",
        "its process ended before it returned",
    ),
    "a long error": ("raise ValueError('x' * 100_000)", "ValueError: x+[.]{3}$"),
    "an error with half a surrogate pair and control characters": (
        "raise ValueError('a\\ud800b\\x00\\x1b[1m \\u202e \\x7fc')",
        r"ValueError: a\\ud800b \[1m c$",
    ),
    "an unprintable error": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "but E$"),
    "a value that is no number": ("return object()", "TypeError.*not JSON serializable"),
    "an equal value": ("class A(int):\n    def __eq__(self, other): return True\nreturn A(3)", "but it is 3"),
}


IDLE = ("sleep", "fork bomb that never gives up")  # the children of a fork bomb share the CPU


def limits_for(name: str) -> Sandbox:
    return Sandbox(limits=Limits(seconds=2)) if name in IDLE else SANDBOX


def assert_processes_are_limited(sandbox: Sandbox) -> None:
    """Call it before a fork bomb, which would stop the machine if the limit of processes were broken."""
    body, pattern = HOSTILE["a hundred processes"]
    assert re.search(pattern, verify(TASK, function(body), sandbox).error)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    others = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_as_a_failing_test_with_a_short_error(name: str) -> None:
    if "fork bomb" in name:
        assert_processes_are_limited(SANDBOX)
    body, pattern = HOSTILE[name]
    verdict = verify(TASK, function(body), limits_for(name))
    assert verdict.passed == 0 and verdict.total == 3
    assert verdict.error.startswith("gauge(7, 2) should be 5, but ")
    assert re.search(pattern, verdict.error), verdict.error
    assert len(verdict.error) < LONGEST_PROBLEM + 60 and verdict.error.isprintable()
    assert verdict.unsure == (name in IDLE)


def test_the_network_of_the_machine_is_not_there() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        address = listener.getsockname()
        verdict = verify(TASK, function(f"socket.create_connection({address})"), SANDBOX)
        assert "ConnectionRefusedError" in verdict.error
        with pytest.raises(TimeoutError):
            listener.accept()


VERDICTS = [
    (TASK.solution, 3, None),
    ("import math\ndef gauge(a, b):\n    return math.trunc(blend(a, b) - 2 * b)", 3, None),
    ("def gauge(a, b):\n    return a + b", 0, "it is 9"),
    ("def gauge(a, b):\n    return max(a - b, 6)", 2, "it is 6"),
    ("def gauge(a, b)\n    return a - b", 0, "SyntaxError.*"),
    ("x = 1", 0, "gauge is not defined"),
]


@pytest.mark.parametrize(("source", "passed", "wrong"), VERDICTS)
def test_a_verdict_says_what_is_wrong(source: str, passed: int, wrong: str | None) -> None:
    """A function may use the rest of the module, such as blend, and the standard library."""
    verdict = verify(TASK, source, SANDBOX)
    assert verdict.passed == passed
    assert re.fullmatch(rf"gauge\(7, 2\) should be 5, but {wrong}" if wrong else "", verdict.error)


def test_the_server_refuses_to_start_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bubblewrap", lambda: None)
    with pytest.raises(ConfigError, match="bwrap: .*not installed; .*bubblewrap.*--without-isolation"):
        Sandbox().check()


SKIPPED = 'while [ "$1" != -- ]; do shift; done; shift; '  # the options of a program that starts another
NO_ISOLATION = [
    ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions to create"),
    (SKIPPED * 3 + 'exec "$@"', "network interfaces|does not run"),
]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a shell script in the place of bwrap."""

    def replace(script: str) -> None:
        path = tmp_path / "bwrap"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(module, "bubblewrap", lambda: str(path))

    return replace


@pytest.mark.parametrize(("script", "message"), NO_ISOLATION, ids=["not permitted", "does nothing"])
def test_the_server_refuses_to_start_where_bubblewrap_does_not_isolate(
    script: str, message: str, fake: Callable[[str], None]
) -> None:
    fake(script)
    with pytest.raises(ConfigError, match=message) as error:
        Sandbox().check()
    assert "\n" not in str(error.value)


def test_without_isolation_the_limits_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Sandbox(isolated=False, limits=SANDBOX.limits)
    if os.geteuid() == 0:  # whose Python others may not be able to read
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    free.check()
    assert verify(TASK, TASK.solution, free).passed == 3
    assert_processes_are_limited(free)
    for name in ("endless loop", "10 GB of memory", "fork bomb", "its own environment"):
        body, pattern = HOSTILE[name]
        assert re.search(pattern, verify(TASK, function(body), free).error)


def test_a_sandbox_that_does_not_start_is_not_what_the_tests_say(fake: Callable[[str], None]) -> None:
    """As bwrap says when the machine has no room for another process. The server does not remember it."""
    fake("echo bwrap: Resource temporarily unavailable >&2; exit 1")
    verdict = verify(TASK, TASK.solution, SANDBOX)
    assert verdict.unsure and verdict.error.endswith("but the sandbox did not start")


def test_a_python_whose_folder_contains_the_home_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Because the code can read that folder."""
    home = module.python_prefix() / "home"
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ConfigError, match=f"python: the code of the agent could read {home}"):
        Sandbox().check()


@pytest.mark.parametrize("body", EXPRESSIONS)
def test_the_first_test_tells_all_expressions_apart(body: str) -> None:
    task = make_task("stock", {}, "gauge", body)
    values = [eval(one, {"a": 7, "b": 2}) for one in EXPRESSIONS]
    assert task.cases[0].expected == values[EXPRESSIONS.index(body)]
    assert len(set(values)) == len(values)
