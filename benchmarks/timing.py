"""Comparing functions fairly: they take turns, and the best turn of each counts."""

import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

THREADS, ROUNDS = 2, 15
CLEAR_REFS, PEAK = Path("/proc/self/clear_refs"), "VmHWM"


def best_seconds(
    functions: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, least: float = 0.02
) -> dict[str, float]:
    """Seconds per call of each, the least over rounds in which all take turns.

    A quick function is repeated within its turn until the turn lasts `least` seconds.
    """
    repeats = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        repeats[name] = max(1, round(least / max(time.perf_counter() - start, 1e-7)))
    best = dict.fromkeys(functions, float("inf"))
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats[name])
    gc.enable()
    return best


def peak_bytes(module: str, name: str, *options: str) -> int:
    """What `python -m module --peak-of name options` prints: see `peak_of`.

    Its malloc returns a freed tensor to the system: what it kept would hide a part of the peak.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, "--peak-of", name, *options]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout.split()[-1])


def peak_of(function: Callable[[], object]) -> int:
    """Resident bytes at the highest point of one call, above those before it. Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before, but kept for later, would not count
    CLEAR_REFS.write_text("5")  # forget the highest point so far
    before = _peak()
    function()
    return _peak() - before


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(PEAK))


def load() -> float:
    """How busy the machine is besides: ratios of a loaded machine are not evidence."""
    return os.getloadavg()[0]
