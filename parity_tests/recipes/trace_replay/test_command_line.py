"""The four commands: what they write, and one sentence for everything that can be wrong."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

for needed in ("detect_secrets", "openai", "pyarrow"):
    pytest.importorskip(needed)

from composer_plugins.recipes.trace_replay import __main__ as command  # noqa: E402
from composer_plugins.recipes.trace_replay import demo, journal  # noqa: E402
from composer_plugins.recipes.trace_replay.states import read_states  # noqa: E402
from composer_plugins.recipes.trace_replay.teachers import load_teachers  # noqa: E402
from parity_tests.rigs.scripted_faults import FaultyTeachers  # noqa: E402

SESSION, TOOLS = demo.SESSION, demo.TOOLS


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in `tmp_path`, as from a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "300")

    def run_command(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["trace_replay", *map(str, arguments)])
        code: object = 0
        try:
            command.main()
        except SystemExit as end:
            code = end.code
        return Ran(int(str(code or 0)), *capsys.readouterr())

    return run_command


def error(ran: Ran) -> str:
    assert ran.code == 2 and ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran
    return ran.err.removeprefix("error: ").strip()


def states(run: Run, out: object = "run", **options: object) -> Ran:
    given = {"redact": "secrets", "tools": TOOLS, **options}
    return run("states", SESSION, "--out", out, *(f"--{name}={value}" for name, value in given.items()))


def write_teachers(path: Path, base_url: str) -> Path:
    entry = {"usd_per_million_input": 1, "usd_per_million_output": 5, "max_tokens": 256, "base_url": base_url}
    teachers = [{"name": name, "model": name, **entry} for name in demo.TEACHERS]
    path.write_text(yaml.safe_dump({"teachers": teachers}))
    return path


def test_the_steps_one_after_the_other(run: Run, tmp_path: Path) -> None:
    """And again: every step can be run a second time, and asks nothing twice."""
    with FaultyTeachers(demo.scripted_answer) as server:
        teachers = write_teachers(tmp_path / "teachers.yaml", server.base_url)
        for _ in range(2):
            assert states(run).out.startswith("11 states in run/states.jsonl")
            ran = run("replay", "run", "--teachers", teachers, "--max-usd", "1")
            assert "33 new answers, 0 from before" in ran.out or "0 new answers, 33 from before" in ran.out
            assert ran.code == 0 and "0 failed, 0 did not fit the budget" in ran.out
            ran = run("pairs", "run", "--ignore", "Bash.description")
            assert ran.code == 0 and ran.out.startswith("5 pairs in run/pairs.parquet")
        assert len(server.requests) == 33
    written = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"run.json", "states.jsonl", "answers.sqlite", "pairs.parquet", "report.md", "README.md"}
    assert written == expected
    text = "".join(
        (tmp_path / "run" / name).read_text() for name in ("states.jsonl", "report.md", "README.md")
    )
    assert not any(secret in text for secret in demo.PLANTED) and str(tmp_path) not in text
    report = (tmp_path / "run/report.md").read_text()
    assert "- Arguments that are not compared: Bash.description." in report
    assert "ada (11 answers), bob (11 answers), eve (11 answers)." in (tmp_path / "run/README.md").read_text()
    assert "- States without tools: 0" in report
    for part in ("5 pairs: 5 by agreement", "| 3 of 3 | 4 |", "| ada | 11 |", "| AWS Access Key | 1 |"):
        assert part in report
    one = "| dropped: it calls a tool that the state does not have | 1 |"
    assert one in report and "| text alone, which agrees with nothing without a judge | 6 |" in report


def test_nothing_is_written_before_redaction_is_decided(run: Run, tmp_path: Path) -> None:
    assert error(run("states", SESSION, "--out", "run")) == (
        "--redact: it is not decided whether secrets are replaced, and states are sent to teachers; "
        "set --redact secrets, or --redact nothing"
    )
    assert error(states(run, redact="some")).startswith("--redact: unknown choice 'some'; known: nothing")
    assert not list(tmp_path.iterdir())
    assert states(run, redact="nothing").code == 0
    text = (tmp_path / "run/states.jsonl").read_text()
    assert all(secret in text for secret in demo.PLANTED)


def test_a_run_keeps_its_folder_to_itself(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    for change in ({"redact": "nothing"}, {"format": "openai"}):
        problem = f"--out: run has the states of a run with other {next(iter(change))}; name another folder"
        assert error(states(run, **change)) == problem
    (tmp_path / "run/run.json").unlink()
    assert error(states(run)).startswith("DIR: run/run.json cannot be read (FileNotFoundError")
    (tmp_path / "run/run.json").write_text("{}")
    assert error(states(run)).startswith("DIR: run/run.json was not written by the command `states`")


def test_what_a_run_wrote_is_no_log_of_the_next(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(SESSION.read_bytes())
    for _ in range(2):
        assert run("states", ".", "--out", "run", "--redact", "nothing").out.startswith("11 states")


def test_logs_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.jsonl").write_text('{"ts": 1, "msg": "started"}\n')
    (tmp_path / "torn.jsonl").write_text('{"type": "user", "uu')
    (tmp_path / "text.jsonl").write_text("started\nended\n")
    (tmp_path / "silent.jsonl").write_text(SESSION.read_text().splitlines()[2] + "\n")
    expected = {
        "empty": "empty: the folder has no *.jsonl file; name a folder that holds logs",
        "gone": "gone: there is no such file or folder; name log files or folders",
        "foreign.jsonl": "foreign.jsonl:1: the line is of no known format, its fields are msg, ts; give logs "
        "of one of these formats: claude-code, openai, verifiers",
        "torn.jsonl": "torn.jsonl:1: the line is not JSON",
        "text.jsonl": "text.jsonl:1: the line is not JSON",
        "silent.jsonl": "LOGS: no action of a model is in 1 file(s); give logs in which a model acted",
    }
    for name, message in expected.items():
        assert error(run("states", name, "--out", "run", "--redact", "nothing")).startswith(message)
        assert not list((tmp_path / "run").glob("*"))
    problem = "LOGS: no log is given; name log files, or folders with *.jsonl files"
    assert error(run("states", "--redact", "nothing")) == problem
    assert error(states(run, tools="gone.json")).startswith("--tools: gone.json cannot be read: FileNotFound")


def test_an_output_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert error(states(run, out="file")).startswith("--out: 'file' cannot be written")
    assert error(states(run, out="file/run")).startswith("--out: 'file/run' cannot be written (Not a dir")
    assert states(run).code == 0
    (tmp_path / "run/report.md").mkdir()
    with journal.Journal(tmp_path / "run/answers.sqlite"):
        pass
    problem = "report.md: 'run/report.md' cannot be written (Is a directory); name another path"
    assert error(run("pairs", "run")) == problem
    assert error(run("demo", "--out", "run")) == "--out: run is not an empty folder; name a new folder"


def test_pairs_need_states_and_their_answers(run: Run, tmp_path: Path) -> None:
    assert error(run("pairs", "gone")).startswith("DIR: gone/run.json cannot be read (FileNotFoundError")
    assert states(run).code == 0
    message = "run/answers.sqlite: there is no journal; run the command `replay` first"
    assert error(run("pairs", "run")) == message
    ask(tmp_path / "run", "ada")
    with journal.Journal(tmp_path / "run/answers.sqlite") as answers:
        answers.mark(("0" * 16, "ada", 0), 0.0)
        answers.answer(("0" * 16, "ada", 0), usd=0.0, message={"content": "x"}, finish_reason="stop")
    assert error(run("pairs", "run")).startswith("DIR: no answer in run/answers.sqlite belongs to a state in")
    assert error(run("pairs", "run", "--judge", "nowhere:f")).startswith("--judge: 'nowhere:f' cannot be imp")
    assert error(run("pairs", "run", "--ignore", "Bash.x")).startswith("--ignore: unknown argument of a tool")


def ask(folder: Path, *names: str) -> None:
    """Let the journal know that these teachers are to be asked."""
    teachers = load_teachers(write_teachers(folder.parent / "asked.yaml", "http://127.0.0.1:9/v1"))
    with journal.Journal(folder / "answers.sqlite") as answers:
        answers.check_teachers([teacher for teacher in teachers if teacher.name in names])


def answer_first(folder: Path, teacher: str) -> None:
    """Let a teacher do in the first state what the trace did."""
    (first, *_) = read_states(folder / "states.jsonl")
    with journal.Journal(folder / "answers.sqlite") as answers:
        answers.mark((first.id, teacher, 0), 0.0)
        answers.answer((first.id, teacher, 0), usd=0.0, message=first.observed, finish_reason="stop")


def test_no_pair_is_reported_and_is_status_1(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    ask(tmp_path / "run", "ada")
    answer_first(tmp_path / "run", "ada")
    refused = "--min-agree: it is 2, and the journal has 1 teacher(s); set at most the number of teachers"
    assert error(run("pairs", "run")).startswith(refused)
    assert not (tmp_path / "run/report.md").exists()
    ask(tmp_path / "run", "ada", "bob")
    ran = run("pairs", "run")
    assert ran.code == 1 and "no parquet file is written; run/report.md says why\n" in ran.out
    assert not (tmp_path / "run/pairs.parquet").exists() and not (tmp_path / "run/README.md").exists()
    (tmp_path / "run/pairs.parquet").write_text("of before")
    ran = run("pairs", "run")
    assert ran.code == 1 and "run/pairs.parquet is of an earlier run, and is kept" in ran.out
    assert (tmp_path / "run/pairs.parquet").read_text() == "of before"
    assert "| bob | 0 |" in (tmp_path / "run/report.md").read_text()
    assert "| fewer than 2 teachers agree | 1 |" in (tmp_path / "run/report.md").read_text()


def test_a_judge_in_the_current_folder_is_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my_judge.py").write_text("def same(state, messages):\n    return ['x' for _ in messages]\n")
    assert states(run).code == 0
    ask(tmp_path / "run", "ada", "bob")
    with journal.Journal(tmp_path / "run/answers.sqlite") as answers:
        for state in read_states(tmp_path / "run/states.jsonl"):
            for teacher in ("ada", "bob"):
                answers.mark((state.id, teacher, 0), 0.0)
                message = {"role": "assistant", "content": teacher}
                answers.answer((state.id, teacher, 0), usd=0.0, message=message, finish_reason="stop")
    assert run("pairs", "run", "--judge", "my_judge:same").out.startswith("9 pairs")  # two traces have text


def test_a_replay_that_cannot_begin(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    teachers = write_teachers(tmp_path / "teachers.yaml", "http://127.0.0.1:9/v1")
    begun = "replay", "run", "--teachers"
    assert error(run(*begun, teachers, "--max-usd", "0")).startswith("--max-usd: it is 0, and teacher 'ada'")
    assert error(run(*begun, "gone", "--max-usd", "1")).startswith("--teachers: gone cannot be read")
    assert error(run("replay", "gone", "--teachers", teachers, "--max-usd", "1")).startswith(
        "DIR: gone/run.js"
    )
    assert not (tmp_path / "run/answers.sqlite").exists()


def test_what_happened_to_the_logs_is_in_the_folder(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    ran = json.loads((tmp_path / "run/run.json").read_text())
    assert (ran["states"], ran["states_without_tools"], ran["redact"]) == (11, 0, "secrets")
    assert ran["lines"]["torn last line of a file that is being written"] == 1
    without = run("states", SESSION, "--out", "other", "--redact", "secrets").out
    assert "11 states have no tools, so that a teacher can call none there; --tools names a file" in without


def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    with FaultyTeachers(demo.scripted_answer, faults={"eve": ["hang"] * 99}) as server:
        teachers = write_teachers(tmp_path / "teachers.yaml", server.base_url)
        line = ["replay", "run", "--teachers", str(teachers), "--max-usd", "1"]
        with subprocess.Popen(
            [sys.executable, "-m", command.__spec__.parent, *line], cwd=tmp_path, stdout=subprocess.PIPE
        ) as replaying:
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
    assert out.decode().startswith(
        "interrupted: the answers that have arrived are kept; run the same command"
    )


def test_more_teachers_must_agree_than_were_asked(run: Run, tmp_path: Path) -> None:
    """Good pairs of an earlier run stay."""
    assert states(run).code == 0
    with FaultyTeachers(demo.scripted_answer) as server:
        teachers = write_teachers(tmp_path / "teachers.yaml", server.base_url)
        assert run("replay", "run", "--teachers", teachers, "--max-usd", "1").code == 0
    assert run("pairs", "run", "--ignore", "Bash.description").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix != ".sqlite"}
    refused = error(run("pairs", "run", "--min-agree", "4"))
    assert refused.startswith("--min-agree: it is 4, and the journal has 3 teacher(s)")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_teacher_that_the_last_replay_did_not_ask_has_no_vote(run: Run, tmp_path: Path) -> None:
    """A teacher that was changed has a new name, and would otherwise vote twice."""
    assert states(run).code == 0
    with FaultyTeachers(demo.scripted_answer) as server:
        teachers = write_teachers(tmp_path / "teachers.yaml", server.base_url)
        assert run("replay", "run", "--teachers", teachers, "--max-usd", "1").code == 0
        entries = yaml.safe_load(teachers.read_text())["teachers"]
        teachers.write_text(yaml.safe_dump({"teachers": entries[:2]}))
        assert run("replay", "run", "--teachers", teachers, "--max-usd", "1").code == 0
    assert run("pairs", "run", "--ignore", "Bash.description").code == 0
    report = (tmp_path / "run/report.md").read_text()
    assert "| of a teacher that the last replay did not ask | 11 |" in report
    assert "| ada | 11 |" in report and "| eve |" not in report and " of 3 |" not in report


def test_tools_can_be_named_later_until_something_was_asked(run: Run, tmp_path: Path) -> None:
    assert run("states", SESSION, "--out", "run", "--redact", "secrets").code == 0
    assert states(run).code == 0
    assert all(state.tools for state in read_states(tmp_path / "run/states.jsonl"))
    with journal.Journal(tmp_path / "run/answers.sqlite"):
        pass
    again = run("states", SESSION, "--out", "run", "--redact", "secrets")
    assert error(again) == "--out: run has the states of a run with other tools; name another folder"


def test_a_budget_that_is_too_small_says_which_is_enough(run: Run, tmp_path: Path) -> None:
    """With the named budget the next request is sent; with the other all are."""
    assert states(run).code == 0
    with FaultyTeachers(demo.scripted_answer) as server:
        teachers = write_teachers(tmp_path / "teachers.yaml", server.base_url)

        def replay(max_usd: str) -> Ran:
            return run("replay", "run", "--teachers", teachers, "--max-usd", max_usd)

        ran = replay("0.001")
        assert ran.code == 1 and "requests that did not fit the budget: 33; set --max-usd " in ran.out
        words = ran.out.partition("--max-usd ")[2].split()
        smallest, enough = words[0], words[words.index("about") + 1]
        assert not server.requests
        ran = replay(f"{float(smallest) - 1e-5:.6f}")
        assert not server.requests
        replay(smallest)
        assert len(server.requests) >= 1
        assert replay(enough).code == 0 and len(server.requests) == 33


def test_a_judge_that_is_not_found_names_the_folders_that_are_searched(run: Run, tmp_path: Path) -> None:
    assert states(run).code == 0
    assert error(run("pairs", "run", "--judge", "nowhere:f")).endswith(
        "run this command in the folder that holds the module, or put that folder into PYTHONPATH"
    )


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": [{"role": "user", "content": "a"}], '
        '"completion": [{"role": "assistant", "content": "b"}], '
        f'"reward": 1{"0" * 400}}}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
        '"tool_calls": true}]}',
    ],
)
def test_a_value_of_another_type_is_one_sentence(run: Run, tmp_path: Path, row: str) -> None:
    (tmp_path / "log.jsonl").write_text(row + "\n")
    assert error(run("states", "log.jsonl", "--out", "run", "--redact", "nothing")).startswith("log.jsonl")
    assert not (tmp_path / "run/states.jsonl").exists()
