"""Run `python -m verl.trainer.main_ppo` in a process of its own, and end every process that it started."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from composer_plugins.recipes.verl.on_a_cpu import KEPT, PLATFORM, tiny
from composer_plugins.recipes.verl.on_a_cpu.overrides import overrides

REGISTER = "composer_plugins.recipes.verl.on_a_cpu.register"
MARK = "COMPOSER_VERL_RUN"  # in the environment of every process of a run
TIMEOUT = 900.0


class Run(NamedTuple):
    """The result of a run."""

    code: int | None  # 0: it finished; None: it was cut off
    log: str
    metrics: list[dict[str, Any]]  # of each step
    parameters: list[dict[str, Tensor]]  # before the first step, and after each
    seconds: float
    survivors: list[str]  # processes of the run that were alive when main_ppo had ended or timed out
    left: list[str]  # processes that are alive after they were killed


def run(
    out: Path,
    *more: str,
    steps: int = 2,
    timeout: float = TIMEOUT,
    until: str | None = None,
    watch: Callable[[], None] = lambda: None,
    make: Callable[[Path], None] = tiny.make,
    keeps_parameters: bool = True,
    threads: int = 1,
    modules: str = REGISTER,
) -> Run:
    """Train with these overrides, `main_ppo.log` in the folder; every process of the run is then gone.

    `until` cuts the run off as soon as the log says that. `watch` is called a few times a second. `make`
    writes the model, the data and the reward. `threads` is the number for each process, and `modules` are
    those that each imports.
    """
    token = prepared(out, make)
    start = time.monotonic()
    with short_paths() as (short, python), (out / "main_ppo.log").open("w") as log:
        options = [*overrides(out, steps), f"+ray_kwargs.ray_init._temp_dir={short}", *more]
        process = subprocess.Popen(
            [python, "-u", "-m", "verl.trainer.main_ppo", *options],
            cwd=out,
            env=environment(out, token)
            | {"OMP_NUM_THREADS": str(threads), "VERL_USE_EXTERNAL_MODULES": modules}
            | ({KEPT: str(out)} if keeps_parameters else {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            code = wait(process, out / "main_ppo.log", timeout, until, watch)
        finally:
            seconds = time.monotonic() - start
            survivors, left = end(token, 0.0 if code is None else 10.0, process.pid)
            process.wait()
    return Run(
        code,
        (out / "main_ppo.log").read_text(errors="replace"),
        metrics(out / "metrics.jsonl"),
        [torch.load(path) for path in sorted(out.glob("step_*.pt"), key=lambda p: int(p.stem[5:]))],
        seconds,
        survivors,
        left,
    )


@contextmanager
def short_paths() -> Iterator[tuple[Path, str]]:
    """Make a folder for Ray with a short path, and this interpreter by a path in that folder.

    The path of a socket has at most 107 bytes. And Ray starts its workers by a shell, to which it gives the
    path of the interpreter without quotes: a space in it ends every worker.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    (folder / "env").symlink_to(sys.prefix)
    try:
        yield folder, str(folder / "env" / Path(sys.executable).relative_to(sys.prefix))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepared(out: Path, make: Callable[[Path], None] = tiny.make) -> str:
    """Write the files that a run needs into the folder, and return the mark of its processes."""
    make(out)
    (out / "imports").mkdir()
    # Each of ten processes imports verl, and would spend a fifth of that time on collecting garbage.
    (out / "imports" / "sitecustomize.py").write_text("import gc\ngc.set_threshold(100_000)\n")
    return uuid.uuid4().hex


def wait(
    process: subprocess.Popen[bytes], log: Path, timeout: float, until: str | None, watch: Callable[[], None]
) -> int | None:
    """Return the exit code; None after the timeout, or as soon as the log has the words."""
    end = time.monotonic() + timeout
    while (code := process.poll()) is None and time.monotonic() < end:
        if until and until in log.read_text(errors="replace"):
            return None
        watch()
        time.sleep(0.2)
    return code


def environment(out: Path, token: str) -> dict[str, str]:
    """The environment of this process, without what would connect Ray to another cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {
        MARK: token,
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(out / "imports"), os.environ.get("PYTHONPATH")))),
        "RAY_AUTH_TOKEN": token,  # or Ray writes one into the home folder
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        "VERL_PLATFORM": PLATFORM,
        "VERL_USE_EXTERNAL_MODULES": REGISTER,
    }


def metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of each step that verl's file logger wrote."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["data"] for line in sorted(lines, key=lambda line: line["step"])]


def marked(token: str, session: int | None) -> list[psutil.Process]:
    """Find the processes of a run, by its session or by the mark in their environment.

    Neither is enough: some have a session of their own, and Ray's agents overwrite their environment.
    """
    found = []
    for process in psutil.process_iter():
        try:
            ours = os.getsid(process.pid) == session or process.environ().get(MARK) == token
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue  # gone, or another user's
    return found


def end(token: str, grace: float, session: int | None = None) -> tuple[list[str], list[str]]:
    """Kill the processes of a run; return those alive after the grace, and those alive after the kill."""
    until = time.monotonic() + grace
    while (alive := marked(token, session)) and time.monotonic() < until:
        time.sleep(0.2)  # Ray's own processes end a moment after the driver
    survivors = [named(process) for process in alive]
    for _ in range(25):
        if not alive:
            break
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=1)
        alive = marked(token, session)
    return survivors, [named(process) for process in alive]


def named(process: psutil.Process) -> str:
    """The id, name and command line of a process, for a message."""
    try:
        return f"{process.pid} {process.name()}: {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return str(process.pid)
