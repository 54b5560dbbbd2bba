"""A script under Monarch: it runs as under torchrun, a failure is an error, and no process is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.monarch import RankError, hosting
from composer_plugins.recipes.monarch.__main__ import check_equal, run
from composer_plugins.recipes.monarch.hosting import Rank

MARK = "COMPOSER_MONARCH_RUN"  # in the environment of every process of a run
COMMAND = [sys.executable, "-m", "composer_plugins.recipes.monarch"]
TIMEOUT = 240.0
ENDING = 20.0  # seconds for processes that were told to end

WAITS = "import time\nprint('waits\\n', end='', flush=True)\ntime.sleep(600)\n"
RANK = "import os\nrank = int(os.environ['RANK'])\n"


class Done(NamedTuple):
    """The end of a run."""

    code: int
    out: str
    error: str
    left: list[str]  # processes of the run that are alive


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run, and its mark. Every process with this mark is killed at the end."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        for one in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.communicate()


def finished(process: subprocess.Popen[str], mark: str) -> Done:
    """Wait for the end of a run, and for that of its processes."""
    out, error = process.communicate(timeout=TIMEOUT)
    end = time.monotonic() + ENDING
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return Done(process.returncode, out, error, [Path(f"/proc/{one}/cmdline").read_text() for one in left])


def ran(*arguments: str, folder: Path) -> Done:
    """Run the command to its end."""
    with started(*arguments, folder=folder) as (process, mark):
        return finished(process, mark)


def hosted(folder: Path, script: str, *options: str) -> Done:
    """Write the script and run it on two ranks."""
    folder.joinpath("script.py").write_text(script)
    return ran(*options, "script.py", folder=folder)


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if f"{MARK}={mark}\0" in folder.joinpath("environ").read_text(errors="replace"):
                found.append(int(folder.name))
    return found


ENVIRONMENT = """
import json, os, sys
import beside_the_script
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
assert 0 < int(os.environ["MASTER_PORT"]) < 2**16
print(json.dumps([__name__, sys.argv[1:], *map(os.environ.get, names)]) + "\\n", end="", flush=True)
sys.exit(0)
"""


def test_a_script_runs_on_every_rank_as_under_torchrun(tmp_path: Path) -> None:
    """With its arguments and the modules beside it; sys.exit(0) is no failure."""
    tmp_path.joinpath("beside_the_script.py").write_text("")
    tmp_path.joinpath("elsewhere").mkdir()
    tmp_path.joinpath("script.py").write_text(ENVIRONMENT)
    done = ran("../script.py", "--lr", "-m", "x y", folder=tmp_path / "elsewhere")
    expected = '["__main__", ["--lr", "-m", "x y"], "{0}", "{0}", "2", "2", "127.0.0.1", "1"]'
    assert done.code == 0, done.error
    assert sorted(done.out.splitlines()) == [expected.format(0), expected.format(1)]
    assert "../script.py: 2 processes ended well" in done.error and not done.left


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    tmp_path.joinpath("module_13.py").write_text("import sys\nprint(__name__, *sys.argv[1:])")
    done = ran(*["--processes", "1", "-m", "module_13", "--processes", "7"], folder=tmp_path)
    assert (done.code, done.out.split()) == (0, ["__main__", "--processes", "7"]), done.error


def test_a_failing_rank_is_an_error_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    """And what they have started; the frames of Monarch and of this recipe are left out."""
    script = f"""{RANK}
if rank == 1:
    try:
        {{}}["cause"]
    except KeyError as error:
        raise ValueError("deliberate") from error
import subprocess
subprocess.Popen(["sleep", "600"])
{WAITS}"""
    done = hosted(tmp_path, script)
    assert done.code == 1 and not done.left
    told = done.error[done.error.index("error: ") :]
    assert told.startswith("error: rank 1 failed: Traceback") and told.endswith("ValueError: deliberate\n")
    assert "KeyError: 'cause'" in told and f'File "{tmp_path}/script.py", line 8' in told
    assert "runpy" not in told and "monarch" not in told and "rank 0" not in told


@pytest.mark.slow
def test_a_rank_that_is_killed_is_an_error_and_ends_the_others(tmp_path: Path) -> None:
    script = f"{RANK}import signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n{WAITS}"
    done = hosted(tmp_path, script)
    assert done.code == 1 and "error: rank 0 failed: its process ended: " in done.error, done.error
    assert "Killed(sig=9)" in done.error and not done.left


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys\nsys.exit('error: it is 3; set 2')", "ranks 0 and 1 failed: error: it is 3; set 2\n"),
        (f"{RANK}import sys\nsys.exit(3 * rank)", "rank 1 failed: it ended with exit status 3\n"),
    ],
)
def test_how_a_script_exits_is_the_error_without_a_traceback(tmp_path: Path, script: str, said: str) -> None:
    done = hosted(tmp_path, script)
    assert done.code == 1 and "Traceback" not in done.error, done.error
    assert f"error: {said}" in done.error


def test_a_rank_that_waits_for_ever_in_rendezvous_is_one_sentence(tmp_path: Path) -> None:
    """Found by the name of torch's function, which the script has here."""
    waits = "def init_process_group():\n    import time; time.sleep(600)\n"
    script = f"{RANK}{waits}if rank: init_process_group()"
    done = hosted(tmp_path, script, "--rendezvous-timeout", "1")
    assert done.code == 2 and not done.left
    assert (
        "error: --rendezvous-timeout: rank 1 has waited 1 s in init_process_group at "
        f"{tmp_path}/script.py:5, and rank 0 ended without it; call it on every rank, with the RANK and "
        "WORLD_SIZE of the environment, or allow more seconds\n"
    ) in done.error


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_no_process_is_left_after_ctrl_c_or_a_signal(tmp_path: Path, number: int, code: int) -> None:
    tmp_path.joinpath("script.py").write_text(WAITS)
    with started("script.py", folder=tmp_path) as (process, mark):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["waits\n", "waits\n"]
        assert len(marked(mark)) == 3
        os.killpg(process.pid, number)
        done = finished(process, mark)
    assert (done.code, done.left) == (code, [])
    assert ("interrupted: all processes were ended" in done.error) is (number == signal.SIGINT)


BAD = [
    ({"script": "."}, ".: it is a folder; name a Python file"),
    ({"script": "x.py", "processes": 0}, "--processes: it is 0; set 1 or more"),
    ({"processes": -1}, "--processes: it is -1; set 1 or more"),
    ({"script": "x.py", "rendezvous_timeout": 0.0}, "--rendezvous-timeout: it is 0; set seconds above 0"),
    ({"rendezvous_timeout": float("nan")}, "--rendezvous-timeout: it is nan; set seconds above 0"),
    ({"script": "no_such.module", "module": True}, "-m no_such.module: there is no such module; install it"),
    ({"module": True}, "-m: no module is named; write the module"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_wrong_option_is_one_sentence_before_anything_starts(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(**({"processes": 2, "module": False, "rendezvous_timeout": 300.0} | options))
    assert str(refused.value).startswith(message)


def test_an_error_is_printed_without_a_traceback_and_the_status_is_2(tmp_path: Path) -> None:
    done = ran("absent.py", folder=tmp_path)
    said = "error: absent.py: there is no such file; name a Python file, or a module after -m\n"
    assert (done.code, done.out, done.error) == (2, "", said)


def test_a_rank_that_trained_alone_or_has_other_weights_or_losses_is_an_error() -> None:
    first = Rank(1, 2, [0.5, 0.25], "a" * 64)
    check_equal("demo", [first, first._replace(process=2)])
    for other in (first._replace(weights="b" * 64), first._replace(losses=[0.5, 0.125])):
        with pytest.raises(RankError, match="demo: rank 1 has other losses or weights than rank 0"):
            check_equal("demo", [first, other])
    with pytest.raises(RankError, match="demo: rank 0 trained with 1 of 2 ranks"):
        check_equal("demo", [first._replace(ranks=1)] * 2)
    with pytest.raises(RankError, match="demo: rank 0 recorded no losses"):
        check_equal("demo", [first._replace(losses=[])] * 2)


class Fails:
    """The answer of a rank: an error, which Monarch reports after it was asked so many times."""

    def __init__(self, error: Exception, after: int) -> None:
        self.error, self.after = error, after

    def get(self, timeout: float) -> None:
        self.after -= 1
        raise TimeoutError if self.after >= 0 else self.error


@pytest.mark.parametrize("after", [20, 10**9])
def test_a_rank_whose_process_has_ended_is_named_however_late(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure is the connection that another rank lost."""
    monkeypatch.setattr(hosting, "GRACE", -1.0)
    monkeypatch.setattr(hosting, "LATE", 60.0 if after == 20 else -1.0)
    monkeypatch.setattr(hosting, "failure", lambda asked, error: str(error))
    lost, killed = Fails(ValueError("lost"), 0), Fails(ValueError("its process ended: Killed(sig=9)"), after)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        with pytest.raises(RankError) as found:
            hosting.watch([killed, lost], [None, None], 1.0, [process.pid, os.getpid()])
    how = ": Killed(sig=9)" if after == 20 else ", and Monarch did not report how"
    assert str(found.value) == f"rank 1 failed: lost\nrank 0 failed: its process ended{how}"
