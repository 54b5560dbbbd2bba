"""The journal: what is committed stays, one process at a time, and one sentence for any other file."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay.journal import SCORE, Answer, Journal, Score
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.replayed import a_teacher

MESSAGE = {"role": "assistant", "content": "日本 \u2028"}


def test_answers_scores_and_failures_are_read_as_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for sample in (1, 0):
            journal.mark(("s", "t", sample), 0.5)
            journal.answer(("s", "t", sample), usd=0.25, message=MESSAGE, finish_reason="stop")
        journal.mark(("s", "u", SCORE), 1.0)
        score = {"token_ids": [1, 2], "logprobs": [0.0, -1.5], "start": 1}
        journal.answer(("s", "u", SCORE), usd=0.0, logprobs=score)
        journal.mark(("s", "u", 0), 1.0)
        journal.fail(("s", "u", 0), usd=0.125, error="why", was_answered=True)
        journal.mark(("s", "u", 1), 2.0)
    with Journal(tmp_path / "j", create=False) as journal:
        assert [*journal.answers()] == [Answer("s", "t", k, MESSAGE, "stop", 0.25) for k in (0, 1)]
        assert [*journal.scores()] == [Score("s", "u", [1, 2], [0.0, -1.5], 1)]
        assert journal.failures() == ["why"]
        assert journal.answered() == {("s", "t", 0), ("s", "t", 1), ("s", "u", SCORE)}
        assert (journal.interrupted, journal.spent()) == (1, 0.25 + 0.25 + 0.125 + 2.0)


def test_what_is_spent_is_the_sum_of_all_requests_for_an_answer(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        spent = []
        for _ in range(2):  # the first of them is interrupted
            journal.mark(("s", "t", 0), 1.0)
            spent.append(journal.spent())
        journal.fail(("s", "t", 0), usd=0.5, error="", was_answered=True)
        spent.append(journal.spent())
        journal.mark(("s", "t", 0), 1.0)
        journal.answer(("s", "t", 0), usd=0.25, message=MESSAGE)
        spent.append(journal.spent())
    with Journal(tmp_path / "j") as journal:
        assert [*spent, journal.spent()] == [1.0, 2.0, 1.5, 1.75, 1.75]


SECOND = """
import sys
from composer_plugins.recipes.trace_replay.journal import Journal
Journal(sys.argv[1])
"""


@pytest.mark.parametrize("is_new", [True, False])
def test_a_second_process_is_an_error(tmp_path: Path, is_new: bool) -> None:
    if not is_new:
        Journal(tmp_path / "j").close()
    with Journal(tmp_path / "j"):
        command = [sys.executable, "-c", SECOND, tmp_path / "j"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = f"{tmp_path / 'j'}: another process has this journal open; wait until it has ended\n"
    assert second.stderr.endswith(f"ConfigError: {said}"), second.stderr
    Journal(tmp_path / "j").close()


def refusal(path: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as refused:
        Journal(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"{path}: ")


def test_a_file_that_is_no_journal_is_not_touched(tmp_path: Path) -> None:
    text = b"what somebody wrote\n" * 100
    (tmp_path / "text").write_bytes(text)
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE answers (state)")
    before = (tmp_path / "other").read_bytes()
    for name in ("text", "other"):
        expected = "this file is not a journal of this recipe; name another folder"
        assert refusal(tmp_path / name, DataError) == expected
    assert ((tmp_path / "text").read_bytes(), (tmp_path / "other").read_bytes()) == (text, before)


def test_a_journal_of_another_version(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    with closing(sqlite3.connect(tmp_path / "j")) as journal:
        journal.execute("PRAGMA user_version = 7")
    said = "the journal has format 7, and this version reads 1; "
    assert refusal(tmp_path / "j", DataError).startswith(said)


def test_a_damaged_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for sample in range(200):
            journal.mark(("s", "t", sample), 0.0)
            journal.answer(("s", "t", sample), usd=0.0, message=MESSAGE)
    content = bytearray((tmp_path / "j").read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    (tmp_path / "j").write_bytes(content)
    assert refusal(tmp_path / "j", DataError).startswith("the journal is damaged (")


def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    said = refusal(Path("/proc/answers.sqlite"), ConfigError)
    assert said.startswith("the journal cannot be opened or written (unable to open database file); ")


def test_a_name_keeps_its_model_once_it_has_answered(tmp_path: Path) -> None:
    teacher, moved = a_teacher("http://a/v1"), a_teacher("http://b/v1", usd_per_million_input=9)
    with Journal(tmp_path / "j") as journal:
        for corrected in (a_teacher("http://a/v1", model="wrong name"), teacher):
            journal.check_teachers([corrected])
        journal.mark(("s", "a", 0), 1.0)
        journal.answer(("s", "a", 0), usd=1.0, message=MESSAGE)
        journal.check_teachers([moved, a_teacher("http://a/v1", name="b")])
        for change in ({"model": "b"}, {"params": {"temperature": 0.5}}, {"max_tokens": 51}):
            with pytest.raises(ConfigError, match="^teacher 'a': .* has its answers to other requests: {"):
                journal.check_teachers([a_teacher("http://a/v1", **change)])
