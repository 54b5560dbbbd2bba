"""The journal: what is written stays, half a last line goes, and one process at a time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay.journal import Answer, Failure, Journal

MESSAGE = {"role": "assistant", "content": "日本 \u2028"}


def answer(sample: int, usd: float = 0.0) -> Answer:
    return Answer("s", "t", sample, usd, MESSAGE, "stop")


def test_answers_and_failures_are_read_as_written(tmp_path: Path) -> None:
    entries = [Failure("s", "t", 0, 0.5, "first"), answer(1, 0.25), answer(0, 0.25)]
    entries += [Failure("s", "v", 0, 0.125, why) for why in ("why", "why again")]
    with Journal(tmp_path / "j") as journal:
        for entry in entries:
            journal.add(entry)
        before = journal.spent
    with Journal(tmp_path / "j") as journal:
        assert journal.answers() == [answer(0, 0.25), answer(1, 0.25)]
        assert journal.failures() == ["why again"]
        assert journal.failed() == {("s", "t", 0): 1, ("s", "v", 0): 2}
        assert journal.spent == before == 0.5 + 2 * 0.25 + 2 * 0.125


def test_half_of_a_character_is_replaced(tmp_path: Path) -> None:
    """A line that is written can be read again."""
    message, whole = (
        MESSAGE | {"content": "cut \ud83d, \U0001f600"},
        MESSAGE | {"content": "cut \ufffd, \U0001f600"},
    )
    with Journal(tmp_path / "j") as journal:
        journal.add(replace(answer(0), message=message))
        written = journal.answers()
    with Journal(tmp_path / "j") as journal:
        assert journal.answers() == written == [replace(answer(0), message=whole)]


def test_half_a_last_line_is_cut_off_and_said(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for sample in range(3):
            journal.add(answer(sample))
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-1])
    with Journal(tmp_path / "j") as journal:
        assert journal.has_half_line and journal.answers() == [answer(0), answer(1)]
        journal.add(answer(2))
    assert (tmp_path / "j").read_bytes() == whole
    with Journal(tmp_path / "j") as journal:
        assert not journal.has_half_line


def test_a_journal_is_open_once_at_a_time(tmp_path: Path) -> None:
    said = "another process has this journal open; wait until it has ended"
    with Journal(tmp_path / "j"), pytest.raises(ConfigError, match=said):
        Journal(tmp_path / "j")
    Journal(tmp_path / "j").__exit__()


ANSWER = vars(answer(0))
WRONG: dict[str, list[Any]] = {
    "state": [["s"]],
    "teacher": [None],
    "sample": ["0", True, [0]],
    "usd": ["1", None, -1, float("nan"), float("inf"), 10**400],
    "message": ["text"],
    "finish_reason": [None],
    "error": ["both"],
}
LINES = ["what somebody wrote", "[]", '{"state": "s"}', "", "[" * 100_000]
LINES += [json.dumps(ANSWER | {key: value}) for key, values in WRONG.items() for value in values]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_none_of_a_journal_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.add(answer(0))
    text = (tmp_path / "j").read_text() + f"{line}\nhalf"
    (tmp_path / "j").write_text(text)
    said = "/j:2: the line is not one of a journal of this recipe; remove it, or name another folder"
    with pytest.raises(DataError, match=said):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_text() == text


def test_a_journal_that_cannot_be_opened_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'/proc/answers.jsonl' cannot be written"):
        Journal(Path("/proc/answers.jsonl"))
