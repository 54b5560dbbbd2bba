"""Code that is wrong or misbehaves is a failing test with a short error, and no process of it stays."""

import re

import psutil
import pytest

from composer_plugins.recipes.openenv.tasks import EXPRESSIONS, Task, make_task
from composer_plugins.recipes.openenv.verifier import LONGEST_PROBLEM, verify

TASK: Task = make_task("stock", {"blend": "a + b"}, "gauge", "a - b")


@pytest.mark.parametrize(
    ("source", "passed", "wrong"),
    [
        (TASK.solution, 3, None),
        ("import math\ndef gauge(a, b):\n    return math.trunc(blend(a, b) - 2 * b)", 3, None),
        ("def gauge(a, b):\n    return a + b", 0, "it is 9"),
        ("def gauge(a, b):\n    return max(a - b, 6)", 2, "it is 6"),
        ("def gauge(a, b)\n    return a - b", 0, "SyntaxError.*"),
        ("x = 1", 0, "gauge is not defined"),
    ],
)
def test_a_verdict_says_what_is_wrong(source: str, passed: int, wrong: str | None) -> None:
    """A function may use the rest of the module, such as blend, and the standard library."""
    verdict = verify(TASK, source)
    assert (verdict.passed, verdict.total) == (passed, 3)
    assert re.fullmatch(rf"gauge\(7, 2\) should be 5, but {wrong}" if wrong else "", verdict.error)


FORGE = "for i in range(30):\n    try: os.write(i, {!r})\n    except OSError: pass\nos._exit(0)"
MISBEHAVES = {
    "endless loop": ("while True: pass", "it was ended after 2 seconds"),
    "a process that stays": ("os.fork()\ntime.sleep(1000)", "it was ended after 2 seconds"),
    "an early end": ("os._exit(0)", "its process ended before it returned"),
    "exit": ("sys.exit(0)", "SystemExit: 0"),
    "a forged report": (FORGE.format(b'{"value": "passed"}\n'), "it is 'passed'"),
    "no report": (FORGE.format(b"[" * 100_000 + b"\n"), "its report cannot be read"),
    "a long error": ("raise ValueError('x' * 100_000)", r"ValueError: x+\.{3}"),
    "control characters": (r"raise ValueError('a\ud800b\x00\x1b[1m \u202e')", r"ValueError: a\\ud800b \[1m"),
    "a value that is no number": ("return object()", "TypeError.*not JSON serializable"),
    "an equal value": ("class A(int):\n    __eq__ = lambda *_: True\nreturn A(3)", "it is 3"),
}


@pytest.mark.parametrize("name", MISBEHAVES)
def test_code_that_misbehaves_is_a_failing_test_with_a_short_error(name: str) -> None:
    body, problem = MISBEHAVES[name]
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    verdict = verify(TASK, f"import os, sys, time\ndef gauge(a, b):\n{lines}", 2.0)
    assert verdict.passed == 0
    assert re.fullmatch(rf"gauge\(7, 2\) should be 5, but {problem}", verdict.error), verdict.error
    assert len(verdict.error) < LONGEST_PROBLEM + 60 and verdict.error.isprintable()
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "runs the agent's code" in str(one.info["cmdline"])
    ]


@pytest.mark.parametrize("body", EXPRESSIONS)
def test_the_first_test_tells_all_expressions_apart(body: str) -> None:
    task = make_task("stock", {}, "gauge", body)
    values = [eval(one, {"a": 7, "b": 2}) for one in EXPRESSIONS]
    assert task.cases[0].expected == values[EXPRESSIONS.index(body)]
    assert len(set(values)) == len(values)
