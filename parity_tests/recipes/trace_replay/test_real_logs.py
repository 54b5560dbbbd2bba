"""Logs in the shapes that people have: each gives its actions, or the reason why it gives none."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats import log_files, read_logs
from composer_plugins.recipes.trace_replay.formats.common import FAILED_TOOL, Acted, Tally
from parity_tests.rigs.replayed import read_log


def said(acted: Acted) -> list[str]:
    """Each message as its role, its text, and the ids of its calls: "assistant hi [c1]"."""
    return [
        " ".join(
            [
                one["role"],
                *(x for x in (one.get("tool_call_id"), one["content"]) if x),
                *(f"[{call['id']} {call['function']['arguments']}]" for call in one.get("tool_calls", ())),
            ]
        )
        for one in (*acted.messages, acted.observed)
    ]


class Log(NamedTuple):
    name: str
    rows: list[Any]
    actions: list[list[str]]  # what comes before each action, with it
    counted: tuple[str, ...] = ()  # among what is not used, or left out
    outcome: float | None = None


def call(identity: str | None, arguments: str = "{}") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}


def asks(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def tool(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


CALLED, ANSWERED = ["user go", "assistant [a {}]"], ["user go", "assistant done"]
TWO = ["user go", "assistant [call_1_0 {}] [call_1_1 {}]"]
BOTH = ["user go", 'assistant [a {}] [a_2 {"n":2}]']
ONE, SECOND = ["user go", 'assistant [a {"n": 1}]'], ["tool a A", 'assistant [a {"n": 2}]']
FAILED = [f"tool a {FAILED_TOOL}\nx", "assistant done"]
NO_RESULT = "a tool call before it has no result, or a result has no call"
NO_TASK = "nothing comes before it", "its task is not in the log, which begins with the model's own message"
GO, DONE = {"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}
BY_ORDER = "tool result without the id of its call (taken in the order of the calls)"


def line(
    uuid: str, parent: str | None, kind: str, *blocks: Any, identity: str | None = None
) -> dict[str, Any]:
    message = {"role": kind, "content": list(blocks)} | ({"id": identity} if identity else {})
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "message": message}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def use(identity: str, number: int = 0) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "f", "input": {"n": number} if number else {}}


def answer(identity: str, content: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def item(**payload: Any) -> dict[str, Any]:
    return {"timestamp": "t", "type": "response_item", "payload": payload}


def message(role: str, content: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}


A_CALL = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"}
A_RESULT = {"type": "function_call_output", "call_id": "c", "output": "ok"}
META = {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "be brief"}}}
OLD = {"id": "s", "timestamp": "t", "instructions": None}
EVENT = {"type": "event_msg", "payload": {"type": "token_count"}}
ON_ITEMS = [
    item(**message("user", "go")),
    item(**A_CALL),
    item(**A_RESULT),
    item(**message("assistant", "done")),
]
STEP = ["user go", "assistant [c {}]"]
WHOLE = [*STEP, "tool c ok", "assistant done"]
HELLO = line("1", None, "user", text("go"))
SEARCH = {"type": "web_search_call", "status": "completed"}

LOGS = (
    # OpenAI chat, and conversations of verifiers
    Log("calls without ids", [{"messages": [GO, asks(call(None), call(None)), tool("x"), tool("y"), DONE]}],
        [TWO, [*TWO, "tool call_1_0 x", "tool call_1_1 y", "assistant done"]],
        (BY_ORDER,)),
    Log("results without ids", [{"prompt": [GO], "completion": [asks(call("a")), tool("x"), DONE],
        "reward": 1.0}], [CALLED, [*CALLED, "tool a x", "assistant done"]],
        (BY_ORDER,), 1.0),
    Log("an id for two calls of a message", [{"messages": [GO, asks(call("a"), call("a", '{"n":2}')),
        tool("A", tool_call_id="a"), tool("B", tool_call_id="a"), DONE]}],
        [BOTH, [*BOTH, "tool a A", "tool a_2 B", "assistant done"]]),
    Log("a result without a call", [{"messages": [GO, asks(call("a")), tool("x", tool_call_id="b"), DONE]}],
        [CALLED], (NO_RESULT,)),
    Log("a reward", [{"messages": [GO, DONE], "reward": 0.5}], [ANSWERED], (), 0.5),
    Log("a reward that is a flag", [{"messages": [GO, DONE], "reward": True}], [ANSWERED], (), 1.0),
    Log("a reward of parts", [{"messages": [GO, DONE], "reward": {"a": 1}}], [ANSWERED],
        ("field 'reward' that is not a number (not read)",)),
    Log("a failed tool", [{"messages": [GO, asks(call("a")), tool("x", is_error=True), DONE]}],
        [CALLED, [*CALLED, *FAILED]]),
    Log("no task", [{"messages": [asks(call("a")), tool("x", tool_call_id="a"), DONE]}], [],
        NO_TASK),
    Log("an empty completion", [{"prompt": [GO], "completion": []}], [],
        ("rollout with an empty completion",)),
    # Claude Code
    Log("a sub-agent without its task", [line("1", None, "assistant", use("a"), identity="m"),
        line("2", "1", "user", answer("a", "x")),
        line("3", "2", "assistant", text("done"), identity="n")], [],
        NO_TASK),
    Log("a failed tool of Claude Code", [HELLO, line("2", "1", "assistant", use("a"), identity="m"),
        line("3", "2", "user", answer("a", "x", is_error=True)),
        line("4", "3", "assistant", text("done"), identity="n")],
        [CALLED, [*CALLED, *FAILED]]),
    Log("a text in parts", [HELLO, *(line(str(i), "1", "assistant", text(one), identity="m")
        for i, one in enumerate(("I lo", "I look", "I look", "I"), 2))], [["user go", "assistant I look"]],
        ("text that another line of its response has",)),
    Log("an id for two calls", [HELLO, line("2", "1", "assistant", use("a", 1), identity="m"),
        line("3", "2", "user", answer("a", "A")), line("4", "3", "assistant", use("a", 2), identity="n"),
        line("5", "4", "user", answer("a", "B")), line("6", "5", "assistant", text("done"), identity="o")],
        [ONE, [*ONE, *SECOND], [*ONE, *SECOND, "tool a B", "assistant done"]]),
    Log("a result that comes later", [HELLO, line("2", "1", "assistant", use("a")),
        line("3", "2", "assistant", use("b")),
        line("4", "3", "user", answer("a", "A")), line("5", "4", "user", answer("b", "B"))],
        [CALLED], (NO_RESULT,)),
    # Codex
    Log("Codex of 2026", [META, *ON_ITEMS, EVENT], [["system be brief", *STEP], ["system be brief", *WHOLE]],
        ("event_msg token_count",)),
    Log("Codex before September 2025", [OLD, {"record_type": "state"}, *(one["payload"] for one in ON_ITEMS)],
        [STEP, WHOLE], ("line about the session",)),
    Log("Codex with reasoning and a patch", [OLD, message("user", "go"), {"type": "reasoning", "summary": []},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "+x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": {"content": "bad", "success": False}},
        message("assistant", "done")],
        [["user go", 'assistant [c {"input": "+x"}]'],
         ["user go", 'assistant [c {"input": "+x"}]', f"tool c {FAILED_TOOL}\nbad", "assistant done"]],
        ("reasoning of an assistant message (left out of the states)",)),
    Log("Codex after a compaction", [META, *ON_ITEMS, {"type": "compacted", "payload": {"message": "m",
        "replacement_history": [message("user", "summary")]}}, item(**message("assistant", "on"))],
        [["system be brief", *STEP], ["system be brief", *WHOLE], ["user summary", "assistant on"]]),
    Log("Codex after a lost history", [OLD, message("user", "go"), message("assistant", "a"),
        {"type": "event_msg", "payload": {"type": "thread_rolled_back"}}, item(**message("user", "b")),
        item(**message("assistant", "c"))], [["user go", "assistant a"]],
        ("its history is not in the file, after a compaction or a rollback",)),
    # The Responses API
    Log("Responses", [{"input": "go", "instructions": "be brief", "output": [A_CALL], "reward": 1}],
        [["system be brief", *STEP]], (), 1.0),
    Log("Responses in two parts", [{
        "request": {"input": [message("user", "go"), A_CALL, A_RESULT], "tools": [SEARCH]},
        "response": {"output": [{"type": "reasoning"}, message("assistant", "done")]}}], [WHOLE],
        ("tool that is not a function (left out)",)),
    Log("Responses of a chain", [
        {"input": "go", "previous_response_id": "r", "output": [message("assistant", "x")]}],
        [], ("its history is not in the file",)),
    Log("Responses that searched", [{"input": "go", "output": [SEARCH, message("assistant", "x")]},
        {"input": "go", "output": None}], [],
        ("it needs a tool that the provider's server ran", "request that failed")),
)  # fmt: skip


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_each_log_gives_its_actions_and_names_what_it_does_not(tmp_path: Path, log: Log) -> None:
    found, tally = read_log(tmp_path / "l.jsonl", log.rows)
    assert [said(acted) for acted in found] == log.actions
    assert {*log.counted} <= {*tally.actions, *tally.lines}
    assert {acted.outcome for acted in found} <= {log.outcome}


def test_a_uuid_of_two_lines_is_an_error_that_names_both(tmp_path: Path) -> None:
    rows = [HELLO, line("2", "1", "assistant", text("a")), line("1", None, "user", text("other"))]
    with pytest.raises(
        DataError, match=r"l.jsonl:3: its uuid is that of l.jsonl:1, which has another parent or"
    ):
        read_log(tmp_path / "l.jsonl", rows)


@pytest.mark.parametrize("form", ["[{0},\n {0}]", "{0}", "[{0}]\n", "\n [\n{0}]"])
def test_a_file_may_be_one_json_value(tmp_path: Path, form: str) -> None:
    (tmp_path / "l.json").write_text(form.format(json.dumps({"messages": [GO, DONE]}, indent=1)))
    found = list(read_logs(log_files([tmp_path / "l.json"]), None, None, Tally()))
    assert [said(acted) for acted in found] == [ANSWERED] * (1 + form.count("},"))


def test_a_list_of_messages_is_one_conversation(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(json.dumps([GO, DONE]))
    (acted,) = read_logs(log_files([tmp_path / "l.json"]), None, None, Tally())
    assert said(acted) == ANSWERED


def test_a_file_that_cannot_be_read_is_skipped_and_named_unless_strict(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.jsonl").write_text(json.dumps({"messages": [GO, DONE]}))
    (tmp_path / "logs/b.jsonl").write_text('{"type": "started", "key": "k", "agentId": "a"}\n')
    (tmp_path / "logs/c.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    (tmp_path / "logs/d.jsonl").write_text(json.dumps({"messages": [GO, DONE]}) + "\n{}\n")
    files, tally = log_files([tmp_path / "logs"]), Tally()
    found = list(read_logs(files, None, None, tally, is_strict=False))
    assert [acted.source for acted in found] == ["logs/a.jsonl:1"]
    assert list(tally.skipped) == ["logs/b.jsonl", "logs/c.jsonl", "logs/d.jsonl"]
    assert tally.skipped["logs/c.jsonl"] == "logs/c.jsonl: it is a pointer of Git LFS, and not the log itself"
    with pytest.raises(DataError, match=r"b.jsonl:1: the line is of no known format, its fields are agentId"):
        list(read_logs(files, None, None, Tally()))
    with pytest.raises(DataError, match="b.jsonl:1"):
        list(read_logs(files[1:2], None, None, Tally(), is_strict=False))
