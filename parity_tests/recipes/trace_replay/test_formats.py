"""Which files are read, by which reader, and what happens to a file that cannot be read."""

import json
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay.formats import log_files, read_logs, read_tools
from composer_plugins.recipes.trace_replay.formats.common import Tally

CONVERSATION = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_folders_are_searched_and_a_source_has_no_path_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "logs/deep").mkdir(parents=True)
    (tmp_path / "logs/empty.jsonl").touch()
    (tmp_path / "logs/notes.txt").write_text("no log")
    (tmp_path / "logs/deep/l.jsonl").write_text(json.dumps(CONVERSATION))
    tally = Tally()
    (acted,) = read_logs(log_files([tmp_path / "logs"]), [TOOL], tally)
    assert acted.source == "logs/deep/l.jsonl:1" and acted.tools == [TOOL]  # the log has none
    assert tally.lines["file without a line"] == 1


def test_a_file_that_is_given_twice_is_read_once(tmp_path: Path) -> None:
    """And two files with one name are two, whose actions have different keys."""
    for name in ("run1", "run2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "l.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    first, second = (tmp_path / name / "l.jsonl" for name in ("run1", "run2"))
    found = list(read_logs(log_files([first, second, tmp_path / "run2/../run1"]), None, Tally()))
    assert len({acted.key for acted in found}) == len(found) == 2


def test_a_file_that_cannot_be_read_is_skipped_and_named(tmp_path: Path) -> None:
    """If all are, the first error is raised."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.jsonl").write_text(json.dumps(CONVERSATION))
    (tmp_path / "logs/b.jsonl").write_text('{"type": "session_meta", "payload": {}}\n')
    (tmp_path / "logs/c.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    (tmp_path / "logs/d.jsonl").write_text(json.dumps(CONVERSATION) + "\n{}\n")
    files, tally = log_files([tmp_path / "logs"]), Tally()
    found = list(read_logs(files, None, tally))
    assert [acted.source for acted in found] == ["logs/a.jsonl:1"]
    assert list(tally.skipped) == ["logs/b.jsonl", "logs/c.jsonl", "logs/d.jsonl"]
    assert tally.skipped["logs/c.jsonl"].startswith("logs/c.jsonl:1: the line is not JSON: ")
    with pytest.raises(DataError, match=r"b.jsonl:1: the line is of no known format, its fields are payload"):
        list(read_logs(files[1:], None, Tally()))


@pytest.mark.parametrize("content", ["", "[]", "[3]", '{"name": "f"}', "[{}]"])
def test_a_file_of_tools_has_function_tools(tmp_path: Path, content: str) -> None:
    (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ConfigError, match="give a JSON file with a list of OpenAI function tools"):
        read_tools(tmp_path / "tools.json")
    for name, written in (("f", "f"), ("x\ud83d", "x\ufffd")):  # half of a character is replaced
        (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": {"name": name}}]))
        assert read_tools(tmp_path / "tools.json") == [{"type": "function", "function": {"name": written}}]
