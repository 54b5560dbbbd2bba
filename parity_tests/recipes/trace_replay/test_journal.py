"""The journal: what is written stays, half a last line goes, and one process at a time."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay.journal import SCORE, Answer, Journal, Score
from parity_tests.rigs.paths import ROOT

MESSAGE = {"role": "assistant", "content": "日本 \u2028"}
ROW = ("s", "t", 0)


def test_answers_scores_and_failures_are_read_as_written(tmp_path: Path) -> None:
    score = {"token_ids": [1, 2], "logprobs": [0.0, -1.5], "start": 1}
    with Journal(tmp_path / "j") as journal:
        journal.add(ROW, usd=0.5, error="first")
        for sample in (1, 0):
            journal.add(("s", "t", sample), usd=0.25, message=MESSAGE, finish_reason="stop")
        journal.add(("s", "u", SCORE), usd=0.0, score=score)
        for why in ("why", "why again"):
            journal.add(("s", "v", 0), usd=0.125, error=why)
        before = journal.spent
    with Journal(tmp_path / "j", create=False) as journal:
        assert [*journal.answers()] == [Answer("s", "t", k, MESSAGE, "stop", 0.25) for k in (0, 1)]
        assert [*journal.scores()] == [Score("s", "u", [1, 2], [0.0, -1.5], 1)]
        assert journal.failures() == ["why again"] and journal.failed == {ROW: 1, ("s", "v", 0): 2}
        assert journal.answered() == {ROW, ("s", "t", 1), ("s", "u", SCORE)}
        assert journal.teachers() == ["t", "u", "v"]
        assert journal.spent == before == 0.5 + 2 * 0.25 + 2 * 0.125


def test_half_a_last_line_is_cut_off_and_said(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for sample in range(3):
            journal.add(("s", "t", sample), usd=0.0, message=MESSAGE, finish_reason="stop")
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-1])
    with Journal(tmp_path / "j") as journal:
        assert journal.has_half_line and journal.answered() == {ROW, ("s", "t", 1)}
        journal.add(("s", "t", 2), usd=0.0, message=MESSAGE, finish_reason="stop")
    assert (tmp_path / "j").read_bytes() == whole
    with Journal(tmp_path / "j") as journal:
        assert not journal.has_half_line


def test_a_second_process_is_an_error(tmp_path: Path) -> None:
    second = "import sys; from pathlib import Path; "
    second += "from composer_plugins.recipes.trace_replay.journal import Journal; Journal(Path(sys.argv[1]))"
    with Journal(tmp_path / "j"):
        command = [sys.executable, "-c", second, tmp_path / "j"]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = f"{tmp_path / 'j'}: another process has this journal open; wait until it has ended\n"
    assert ran.stderr.endswith(f"ConfigError: {said}"), ran.stderr
    Journal(tmp_path / "j").__exit__()


ANSWER = {"state": "s", "teacher": "t", "sample": 0, "usd": 0.0, "message": MESSAGE, "finish_reason": "stop"}
SCORED = {"state": "s", "teacher": "t", "sample": SCORE, "usd": 0.0}
TOKENS = {"token_ids": [1], "logprobs": [0.0], "start": 0}
CALL = {"function": {"name": "Bash", "arguments": {}}}  # and should be JSON text
WRONG = [
    *(ANSWER | {"usd": usd} for usd in ("1", None, -1, float("nan"), float("inf"), 10**400)),
    *(ANSWER | {"sample": sample} for sample in ("0", True, [0])),
    *(
        ANSWER | {"message": message}
        for message in ("text", {"content": None}, MESSAGE | {"tool_calls": [CALL]})
    ),
    *({key: ANSWER[key] for key in ANSWER if key != missing} for missing in ANSWER),
    *(
        ANSWER | one
        for one in ({"state": ["s"]}, {"teacher": None}, {"finish_reason": None}, {"error": "both"})
    ),
    *(SCORED | {"score": score} for score in (None, {}, TOKENS | {"start": "0"}, TOKENS | {"end": 1})),
    SCORED | {"error": None},
]
LINES = ["what somebody wrote", "[]", '{"state": "s"}', "", "[" * 100_000, *map(json.dumps, WRONG)]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_none_of_a_journal_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.add(ROW, usd=0.0, message=MESSAGE, finish_reason="stop")
    text = (tmp_path / "j").read_text() + f"{line}\nhalf"
    (tmp_path / "j").write_text(text)
    with pytest.raises(
        DataError, match="/j:2: the line is not one of a journal of this recipe; remove it, or"
    ):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_text() == text


def test_nothing_of_a_line_that_cannot_be_written_stays(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path / "j") as journal:
        journal.add(ROW, usd=0.5, error="first")
        size = (tmp_path / "j").stat().st_size
        for room in (0, 30):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
            try:
                with pytest.raises(ConfigError, match="cannot be written"):
                    journal.add(("lost", "t", 0), usd=0.25, error="second")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert (tmp_path / "j").stat().st_size == size
        journal.add(("s", "t", 1), usd=0.5, error="third")
        assert journal.spent == 1.0
    with Journal(tmp_path / "j") as journal:
        assert not journal.has_half_line and journal.failures() == ["first", "third"]


def test_a_journal_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no journal; run the command `replay` first"):
        Journal(tmp_path / "j", create=False)
    with pytest.raises(ConfigError, match="'/proc/answers.jsonl' cannot be written"):
        Journal(Path("/proc/answers.jsonl"))
