"""The four commands: what they write, and one sentence for everything that can be wrong."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from composer_plugins.errors import ComposerError
from composer_plugins.recipes.trace_replay import demo
from composer_plugins.recipes.trace_replay.__main__ import app
from composer_plugins.recipes.trace_replay.journal import Answer, Journal
from composer_plugins.recipes.trace_replay.states import read_states
from parity_tests.rigs.scripted_faults import FaultyTeachers

SESSION = demo.SESSION
PLANTED = ("AKIAIOSFODNN7EXAMPLE", "correct-horse-battery-9")  # the secrets of the recorded session
QUOTED = shlex.quote(str(SESSION))
PROGRAM = [sys.executable, "-m", "composer_plugins.recipes.trace_replay"]
STATES = f"states {QUOTED} --out run --tools {shlex.quote(str(demo.TOOLS))} --redact secrets"
REPLAY = "replay run --teachers teachers.yaml --max-usd"
PAIRS = "pairs run --ignore Bash.description"


Run = Callable[[str], Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner(env={"COLUMNS": "300"}).invoke(app, shlex.split(line))


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """The folder of a run that has its states."""
    assert run(STATES).stdout.startswith("11 states in run/states.jsonl")
    write_teachers("http://127.0.0.1:9/v1")
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path) -> Iterator[FaultyTeachers]:
    """The teachers of the demo, which `teachers.yaml` names."""
    with FaultyTeachers(demo.scripted_answer) as started:
        write_teachers(started.base_url)
        yield started


def write_teachers(base_url: str) -> None:
    entry = {"usd_per_million_input": 1, "usd_per_million_output": 5, "max_tokens": 256, "base_url": base_url}
    teachers = [{"name": name, "model": name, **entry} for name in demo.TEACHERS]
    Path("teachers.yaml").write_text(yaml.safe_dump({"teachers": teachers}))


def error(ran: Result) -> str:
    """What `main` prints in one line and with status 2."""
    assert isinstance(ran.exception, ComposerError) and "\n" not in str(ran.exception), ran
    return str(ran.exception)


def test_the_steps_one_after_the_other(run: Run, folder: Path, server: FaultyTeachers) -> None:
    """And again: a second run asks for nothing twice, but for the answer in half of a last line."""
    new, journal = 33, folder / "answers.jsonl"
    for _ in range(2):
        assert run(STATES).stdout.startswith("11 states in run/states.jsonl")
        ran = run(f"{REPLAY} 1")
        assert f"{new} new answers, {33 - new} from before" in ran.stdout
        assert ran.exit_code == 0 and "0 failed, 0 did not fit the budget" in ran.stdout
        cut = "the last line of run/answers.jsonl was written in part and is cut off: "
        assert ran.stdout.startswith(cut) == (new == 1)
        ran = run(PAIRS)
        assert ran.exit_code == 0 and ran.stdout.startswith("5 pairs in run/pairs.parquet")
        journal.write_bytes(journal.read_bytes()[:-9])
        new = 1
    assert len(server.requests) == 34
    written = {"run.json", "states.jsonl", "answers.jsonl", "pairs.parquet", "README.md"}
    assert {path.name for path in folder.iterdir()} == written
    run_json, states, card = ((folder / n).read_text() for n in ("run.json", "states.jsonl", "README.md"))
    assert json.loads(run_json)["redact"] == "secrets"
    assert not any(text in run_json + states + card for text in [*PLANTED, str(folder.parent)])
    reasons = "torn last line of a file that is being written", "dropped: it calls a tool that the state does"
    assert all(f"| {part}" in card for part in ("ada | 11 |", "AWS Access Key | 1 |", *reasons))


BOTH = "--out run --redact nothing"
CANNOT_START = [
    (f"states {QUOTED} {BOTH} --tools gone.json", "--tools: gone.json cannot be read: FileNotFound"),
    (f"states {QUOTED} --redact nothing --out file", "--out: 'file' cannot be written"),
    (f"states {QUOTED} --redact nothing --out file/run", "--out: 'file/run' cannot be written (Not a dir"),
    (f"states empty {BOTH}", "empty: the folder has no *.jsonl file; name log files, or folders with"),
    (f"states gone {BOTH}", "gone: there is no such file or folder; name log files, or folders"),
    (f"states silent.jsonl {BOTH}", "LOGS: no action of a model is in 1 file(s); give logs in which a"),
    ("pairs gone", "DIR: gone/run.json cannot be read (FileNotFoundError"),
    ("replay gone --teachers teachers.yaml --max-usd 1", "DIR: gone/run.js"),
    ("demo --out full", "--out: full is not an empty folder; name a new folder"),
]


@pytest.mark.parametrize(("line", "message"), CANNOT_START)
def test_a_command_that_cannot_start_writes_nothing(run: Run, line: str, message: str) -> None:
    Path("empty").mkdir()
    Path("full").mkdir()
    silent = SESSION.read_text().splitlines()[2] + "\n"
    for name, text in {"file": "text", "full/states.jsonl": "", "silent.jsonl": silent}.items():
        Path(name).write_text(text)
    write_teachers("http://127.0.0.1:9/v1")
    before = {*Path().rglob("*")}
    assert error(run(line)).startswith(message)
    assert not any(path.is_file() for path in {*Path().rglob("*")} - before)


def test_nothing_is_written_before_redaction_is_chosen(run: Run) -> None:
    assert run(f"states {QUOTED} --out run").exit_code == 2 and not Path("run").exists()


def test_what_a_run_wrote_is_no_log_of_the_next(run: Run, tmp_path: Path) -> None:
    """And secrets stay, if nothing is redacted."""
    (tmp_path / "s.jsonl").write_bytes(SESSION.read_bytes())
    for _ in range(2):
        assert run("states . --out run --redact nothing").stdout.startswith("11 states")
    text = (tmp_path / "run/states.jsonl").read_text()
    assert all(secret in text for secret in PLANTED)


def test_no_pair_is_said_and_is_status_1(run: Run, folder: Path) -> None:
    """The only teacher does in the first state what the trace did. Pairs of an earlier run stay."""
    assert error(run("pairs run")) == "run/answers.jsonl: there is no journal; run the command `replay` first"
    first, *_ = read_states(folder / "states.jsonl")
    with Journal(folder / "answers.jsonl") as journal:
        journal.add(Answer(first.id, "ada", 0, 0.0, first.observed, "stop"))
    (folder / "pairs.parquet").write_text("of before")
    ran = run("pairs run")
    assert ran.exit_code == 1 and "     1  fewer than 2 teachers agree\n" in ran.stdout
    assert ran.stdout.endswith("no pair was made, and run/pairs.parquet is not written\n")
    assert not (folder / "README.md").exists()
    assert (folder / "pairs.parquet").read_text() == "of before"


def test_tools_can_be_named_later(run: Run, tmp_path: Path) -> None:
    without = run(f"states {QUOTED} --out run --redact secrets").stdout
    assert "states without tools: 11; a teacher can call none there, and --tools names a file\n" in without
    assert run(STATES).exit_code == 0
    assert all(state.tools for state in read_states(tmp_path / "run/states.jsonl"))


def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on(run: Run, folder: Path) -> None:
    with FaultyTeachers(demo.scripted_answer, faults={"eve": ["hang"] * 99}) as server:
        write_teachers(server.base_url)
        with subprocess.Popen([*PROGRAM, *REPLAY.split(), "1"], stdout=subprocess.PIPE) as replaying:
            try:
                until = time.monotonic() + 60
                while not any(one["model"] == "eve" for one in server.requests):
                    assert time.monotonic() < until and replaying.poll() is None
                    time.sleep(0.05)
                replaying.send_signal(signal.SIGINT)
                out, _ = replaying.communicate(timeout=60)
            finally:
                replaying.kill()
    assert replaying.returncode == 130
    said = "interrupted: the answers that have arrived are kept; run the same command"
    assert out.decode().startswith(said)
    with Journal(folder / "answers.jsonl") as journal:
        answered = len(journal.answers())
    assert len(server.billed) - 8 <= answered < 33  # so many are in flight; test_kills.py goes on


def test_a_budget_that_is_too_small_says_which_is_enough(run: Run, server: FaultyTeachers) -> None:
    ran = run(f"{REPLAY} 0.001")
    assert ran.exit_code == 1 and "33 did not fit the budget" in ran.stdout
    enough = ran.stdout.partition("--max-usd ")[2].split()[0]
    assert not server.requests
    assert run(f"{REPLAY} {enough}").exit_code == 0 and len(server.requests) == 33


def test_the_first_failure_is_shown(run: Run, server: FaultyTeachers) -> None:
    server.faults = {"ada": iter(["400"] * 11)}
    ran = run(f"{REPLAY} 1")
    assert ran.exit_code == 1 and "22 new answers, 0 from before; 11 failed" in ran.stdout
    assert 'the first failure: teacher \'ada\', status 400: \'{"error": {"message": "scripted' in ran.stdout


MARGINS = "composer/replay/rewards/margins of 3 steps: "


@pytest.mark.slow
def test_the_demo_trains_on_what_the_teachers_agreed_on(tmp_path: Path) -> None:
    """As a stranger runs it; the margin of the first step is 0, because policy and reference are equal."""
    options = {"env": os.environ | {"COLUMNS": "200"}, "capture_output": True, "text": True}
    ran = subprocess.run([*PROGRAM, "demo", "--steps", "3"], cwd=tmp_path, timeout=600, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (shown,) = [one.removeprefix(MARGINS) for one in ran.stdout.splitlines() if one.startswith(MARGINS)]
    margins = [float(one) for one in shown.split()]
    assert margins[0] == 0 and margins == sorted(margins) and margins[-1] > 0.2
    assert "33 new answers, 0 from before" in ran.stdout and "5 pairs" in ran.stdout
    assert (tmp_path / "replay_demo/pairs.parquet").exists()
