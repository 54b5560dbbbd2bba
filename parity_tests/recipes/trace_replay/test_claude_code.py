"""Session files of Claude Code: random trees against a simple oracle, and each peculiarity of the format."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats.common import FAILED_TOOL, Acted
from parity_tests.rigs.replayed import read_log

Line = dict[str, Any]
Action = tuple[tuple[str, ...], str]


def user_line(content: Any, **rest: Any) -> Line:
    return {"type": "user", "message": {"role": "user", "content": content}, **rest}


BETWEEN: list[Line] = [  # lines without a message, which may stand between two messages
    {"type": "system", "subtype": "turn_duration"},
    {"type": "attachment", "attachment": {"type": "todo"}},
    {"type": "progress"},
    user_line("a note of the display", isVisibleInTranscriptOnly=True),
]


class Conversations:
    """Writes random conversations as lines, and notes each action with what came before it, as texts."""

    def __init__(self, random: Random) -> None:
        self.random, self.lines, self.actions = random, list[Line](), list[Action]()
        self.is_side_chain = False

    def coin(self) -> bool:
        return self.random.randrange(2) == 1

    def add(self, parent: str | None, **rest: Any) -> str:
        uuid = f"u{len(self.lines)}"
        self.lines.append({"uuid": uuid, "parentUuid": parent, "isSidechain": self.is_side_chain, **rest})
        return uuid

    def between(self, parent: str) -> str:
        choice = self.random.randrange(7)
        return self.add(parent, **BETWEEN[choice]) if choice < len(BETWEEN) else parent

    def user(self, parent: str | None, before: tuple[str, ...], depth: int) -> None:
        """A message of the user, and one response or two branches. A hidden line is such a message too."""
        text = self.random.choice("abcd")
        content: Any = text if self.coin() else [{"type": "text", "text": text}]
        last = self.add(parent, **user_line(content, isMeta=self.coin()))
        for _ in range(self.random.randint(1, 2)):
            self.response(self.between(last), (*before, f"user {text}"), depth)

    def response(self, parent: str, before: tuple[str, ...], depth: int) -> None:
        """A response in several lines, the results of its calls in any order, and what follows it."""
        texts = self.random.sample("efgh", self.random.randrange(3))  # a text again would be a copy
        calls = [
            (self.random.choice("ij"), self.random.choice("kl")) for _ in range(self.random.randrange(4))
        ]
        if not texts and not calls:
            texts = ["e"]
        name, last = f"msg{len(self.lines)}", parent

        def block(parent: str, **content: Any) -> str:
            message = {"id": name, "role": "assistant", "content": [content]}
            return self.add(parent, type="assistant", message=message)

        if self.coin():
            last = block(last, type="thinking", thinking="hm", signature="s")
        for text in texts:
            last = block(last, type="text", text=text)
        as_siblings, start, results = self.coin(), last, list[tuple[str, Line]]()
        for i, (argument, result) in enumerate(calls):
            parent = start if as_siblings else last
            last = block(parent, type="tool_use", id=f"{name}-{i}", name="T", input={"x": argument})
            content = {"type": "tool_result", "tool_use_id": f"{name}-{i}", "content": result}
            results.append((last, user_line([content])))
        for line, row in self.random.sample(results, len(results)):
            last = self.add(line, **row)
        action = f"assistant {'|'.join(texts)} {' '.join(f'call {argument}' for argument, _ in calls)}"
        self.actions.append((before, action))
        after = (*before, action, *(f"tool {result}" for _, result in calls))
        for _ in range(self.random.randrange(3) if depth else 0):
            (self.response if calls else self.user)(self.between(last), after, depth - 1)


def shown(message: dict[str, Any]) -> str:
    if message["role"] == "assistant":
        calls = [json.loads(one["function"]["arguments"])["x"] for one in message.get("tool_calls", ())]
        texts = message["content"].replace("\n\n", "|")
        return f"assistant {texts} {' '.join(f'call {one}' for one in calls)}"
    return f"{message['role']} {message['content']}"


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_action_has_the_messages_that_came_before_it(
    tmp_path_factory: pytest.TempPathFactory, roots: int, random: Random
) -> None:
    """Branches, split responses, parallel calls as a chain or as siblings, lines between, several roots.

    A root may be a side chain: a conversation of its own.
    """
    written = Conversations(random)
    written.lines.append({"type": "summary", "summary": "s", "leafUuid": "x"})
    for _ in range(roots):
        written.is_side_chain = written.coin()
        written.user(None, (), depth=3)
    found, tally = read_log(tmp_path_factory.mktemp("log") / "s.jsonl", written.lines)
    made = Counter((tuple(map(shown, acted.messages)), shown(acted.observed)) for acted in found)
    assert made == Counter(written.actions) and not tally.actions
    for acted in found:  # each call is answered by its own result
        calls = [one["id"] for m in acted.messages for one in m.get("tool_calls", ())]
        assert calls == [m["tool_call_id"] for m in acted.messages if m["role"] == "tool"]


def user(uuid: str, parent: str | None, content: Any, **rest: Any) -> Line:
    return {"uuid": uuid, "parentUuid": parent, **user_line(content, **rest)}


def reply(uuid: str, parent: str | None, *blocks: Any, name: str = "", **rest: Any) -> Line:
    message = {"id": name or f"msg-{uuid}", "role": "assistant", "content": list(blocks), **rest}
    return {"type": "assistant", "uuid": uuid, "parentUuid": parent, "message": message}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(call: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": "ls"}}


def result(call: str, content: Any, **rest: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **rest}


def chain(*contents: Any) -> list[Line]:
    """Lines, each below the one before, of the user and of the model in turn."""
    lines = list[Line]()
    for i, content in enumerate(contents, start=1):
        place = str(i), str(i - 1) if lines else None
        lines.append(user(*place, content) if i % 2 else reply(*place, *content))
    return lines


def contents(acted: Acted) -> list[str]:
    return [message["content"] for message in acted.messages]


A, B = chain("a", [text("b")])


def test_the_last_line_may_be_torn_and_no_other(tmp_path: Path) -> None:
    lines = "".join(json.dumps(one) + "\n" for one in [A, B])
    for torn in ('{"type":"user","uu', '{"type":"user","text":"\udce4\udcf6'):
        found, tally = read_log(tmp_path / "s.jsonl", lines + torn)
        assert len(found) == 1 and tally.lines == {"torn last line of a file that is being written": 1}
    for torn in ('{"type":"us\n' + lines, lines + '{"type":"user"\n', '{"type":"us'):
        with pytest.raises(DataError, match=r"^s\.jsonl:\d: the line is not JSON"):
            read_log(tmp_path / "s.jsonl", torn)


def test_messages_that_a_boundary_kept_follow_the_summary_from_then_on(tmp_path: Path) -> None:
    lines = [
        user("1", None, "first"),
        reply("2", "1", text("one")),
        user("3", "2", "kept"),
        reply("4", "3", text("two")),
        {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None},
        user("s", "b", "summary", isCompactSummary=True, isVisibleInTranscriptOnly=True),
        user("5", "4", "go on"),
        reply("6", "5", text("three")),
    ]
    for metadata in (
        {"preservedSegment": {"headUuid": "3", "anchorUuid": "s", "tailUuid": "4"}},
        {"preservedMessages": {"uuids": ["3", "4"], "anchorUuid": "s"}},
    ):
        lines[4]["compactMetadata"] = metadata
        found, _ = read_log(tmp_path / "s.jsonl", lines)
        assert [contents(acted) for acted in found] == [
            ["first"],
            ["first", "one", "kept"],
            ["summary", "kept", "two", "go on"],
        ]
        assert [acted.source for acted in found] == ["s.jsonl:2", "s.jsonl:4", "s.jsonl:8"]


def test_a_text_that_another_line_has_in_part_is_one_text(tmp_path: Path) -> None:
    parts = [
        reply(str(i), "1", text(one), name="m") for i, one in enumerate(("I lo", "I look", "I look", "I"), 2)
    ]
    (acted,), tally = read_log(tmp_path / "s.jsonl", [A, *parts])
    assert acted.observed["content"] == "I look"
    assert tally.lines == {"text that another line of its response has": 3}


CALL, ON = [use("c")], [text("on")]
PARALLEL = [  # and texts beside the results: they follow all results
    A,
    reply("2", "1", use("c"), name="m"),
    reply("3", "2", use("d"), name="m"),
    user("4", "2", [result("c", "one"), text("note")]),
    user("5", "3", [result("d", "two"), text("more")]),
    reply("6", "5", text("on")),
]
READ: dict[str, tuple[list[Line], list[list[str]]]] = {
    "an error": (
        chain("a", CALL, [result("c", "x", is_error=True)], ON),
        [["a"], ["a", "", f"{FAILED_TOOL}\nx"]],
    ),
    "two calls with one id": (
        chain("a", CALL, [result("c", "one")], CALL, [result("c", "two")], ON),
        [["a"], ["a", "", "one"], ["a", "", "one", "", "two"]],
    ),
    "parallel calls": (PARALLEL, [["a"], ["a", "", "one", "two", "note", "more"]]),
}


@pytest.mark.parametrize(("lines", "expected"), READ.values(), ids=READ)
def test_the_messages_before_each_action(
    tmp_path: Path, lines: list[Line], expected: list[list[str]]
) -> None:
    found, tally = read_log(tmp_path / "s.jsonl", lines)
    assert [contents(acted) for acted in found] == expected and not tally.actions


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WEB = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
IMAGE = "it needs content of the type image"
NOT_ANSWERED = "a tool call before it has no result, or a result has no call"
SYNTHETIC = reply("2", "1", text("API Error"), model="<synthetic>")
LATE = [*chain("a", CALL), reply("3", "2", use("d")), user("4", "3", [result("c", "one")])]
LEFT_OUT: list[tuple[str, list[Line], list[list[str]]]] = [
    (IMAGE, chain([PNG], [text("b")]), []),
    (IMAGE, chain("a", CALL, [result("c", [PNG])], ON), [["a"]]),
    ("it needs content of the type server_tool_use", chain("a", [WEB]), []),
    ("the action is empty", chain("a", [{"type": "thinking", "thinking": "hm"}]), []),
    ("it was cut at the length limit", [A, reply("2", "1", text("b"), stop_reason="max_tokens")], []),
    ("its history is not in the file", [user("1", "gone", "a"), B], []),
    ("its task is not in the log", [reply("2", None, text("b"))], []),
    ("invention", [A, B, {"type": "invention", "uuid": "9", "parentUuid": "2"}], [["a"]]),
    ("assistant line that the model did not write", [A, SYNTHETIC, reply("3", "2", text("b"))], [["a"]]),
    ("line whose uuid an earlier line has", [A, B, A], [["a"]]),
    (  # such as a reminder, of which only an attachment is in the log
        "what it answers is not in the log: the message before it is the model's own",
        [A, B, reply("3", "2", text("c"))],
        [["a"]],
    ),
    (NOT_ANSWERED, chain("a", CALL, "b", ON), [["a"]]),
    (NOT_ANSWERED, LATE, [["a"]]),  # a result that comes after the next response
    (NOT_ANSWERED, [A, user("3", "1", [result("c", "one")]), reply("4", "3", text("d"))], []),
]


@pytest.mark.parametrize(("reason", "lines", "expected"), LEFT_OUT)
def test_what_cannot_be_replayed_is_left_out_and_counted(
    tmp_path: Path, reason: str, lines: list[Line], expected: list[list[str]]
) -> None:
    found, tally = read_log(tmp_path / "s.jsonl", lines)
    assert [contents(acted) for acted in found] == expected
    assert (tally.actions or tally.lines) == {reason: 1}


WRONG: list[tuple[Line, str]] = [
    ({"type": "user", "uuid": "9"}, "3: it is not as its format says (KeyError: 'message'); correct or"),
    (user("9", "2", [{"type": "text"}]), "3: it is not as its format says (KeyError: 'text')"),
    (user("9", "9", "x"), "4: its parentUuid leads back to itself"),
]


@pytest.mark.parametrize(("line", "problem"), WRONG)
def test_a_wrong_line_is_an_error_that_names_file_and_line(tmp_path: Path, line: Line, problem: str) -> None:
    with pytest.raises(DataError) as refused:
        read_log(tmp_path / "s.jsonl", [A, B, line, reply("10", "9", text("c"))])
    assert str(refused.value).startswith(f"s.jsonl:{problem}")


def test_half_of_a_character_is_replaced(tmp_path: Path) -> None:
    (acted,), _ = read_log(tmp_path / "s.jsonl", [A, reply("2", "1", text("x\ud800y"))])
    assert acted.observed["content"] == "x\ufffdy"
