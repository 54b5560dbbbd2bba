"""Session files of Claude Code: random trees against a simple oracle, and each peculiarity of the format."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats.common import FAILED_TOOL, Acted
from parity_tests.rigs.replayed import read_log

Line = dict[str, Any]

# A conversation as it happened: the oracle reads this, and the reader what the writer below makes of it.


@dataclass
class User:
    text: str
    then: list["Response"] = field(default_factory=list)


@dataclass
class Response:
    texts: list[str]
    calls: list[tuple[str, str]]  # an argument and the result
    then: list["User | Response"] = field(default_factory=list)


@st.composite
def conversations(draw: st.DrawFn, depth: int = 3) -> User:
    word = st.sampled_from("abcd")
    responses = [draw(answers(depth)) for _ in range(draw(st.integers(1, 2)))]
    return User(draw(word), responses)


@st.composite
def answers(draw: st.DrawFn, depth: int) -> Response:
    words = st.lists(st.sampled_from("efgh"), max_size=2, unique=True)  # a text again is a copy
    pairs = st.tuples(st.sampled_from("ij"), st.sampled_from("kl"))
    texts, calls = draw(words), draw(st.lists(pairs, max_size=3))
    if not texts and not calls:
        texts = ["e"]
    then: list[User | Response] = []
    if depth:
        child = answers(depth - 1) if calls else conversations(depth - 1)
        then = [draw(child) for _ in range(draw(st.integers(0, 2)))]
    return Response(texts, calls, then)


def expected(node: User | Response, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each action with what came before it, as texts that name no id."""
    if isinstance(node, User):
        said = (f"user {node.text}",)
    else:
        calls = " ".join(f"call {argument}" for argument, _ in node.calls)
        action = f"assistant {'|'.join(node.texts)} {calls}"
        yield before, action
        said = (action, *(f"tool {result}" for _, result in node.calls))
    for child in node.then:
        yield from expected(child, before + said)


def user_line(content: Any, **rest: Any) -> Line:
    return {"type": "user", "message": {"role": "user", "content": content}, **rest}


class Writer:
    """Writes conversations as lines, with everything between them that the format has."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose, self.lines, self.number, self.is_side_chain = choose, list[Line](), 0, False

    def add(self, parent: str | None, **rest: Any) -> str:
        self.number += 1
        line = {"uuid": f"u{self.number}", "parentUuid": parent, "isSidechain": self.is_side_chain, **rest}
        self.lines.append(line)
        return f"u{self.number}"

    def between(self, parent: str) -> str:
        """Now and then a line without a message stands between two messages."""
        between: list[dict[str, Any]] = [
            {"type": "system", "subtype": "turn_duration"},
            {"type": "attachment", "attachment": {"type": "todo"}},
            {"type": "progress"},
            user_line("a note of the display", isVisibleInTranscriptOnly=True),
        ]
        choice = self.choose(7)
        return self.add(parent, **between[choice]) if choice < 4 else parent

    def block(self, parent: str, response: str, block: dict[str, Any]) -> str:
        return self.add(
            parent, type="assistant", message={"id": response, "role": "assistant", "content": [block]}
        )

    def write(self, node: User | Response, parent: str | None) -> None:
        if isinstance(node, User):
            content: Any = node.text if self.choose(2) else [{"type": "text", "text": node.text}]
            last = self.add(parent, **user_line(content, isMeta=bool(self.choose(2))))
        else:
            assert parent is not None
            last = self.response(node, parent)
        for child in node.then:
            self.write(child, self.between(last))

    def response(self, node: Response, parent: str) -> str:
        self.number += 1
        name, last = f"msg{self.number}", parent
        if self.choose(2):
            last = self.block(last, name, {"type": "thinking", "thinking": "hm", "signature": "s"})
        for text in node.texts:
            last = self.block(last, name, {"type": "text", "text": text})
        as_siblings, own = self.choose(2), list[tuple[str, str, str]]()
        start = last
        for i, (argument, result) in enumerate(node.calls):
            block = {"type": "tool_use", "id": f"{name}-{i}", "name": "T", "input": {"x": argument}}
            last = self.block(start if as_siblings else last, name, block)
            own.append((last, f"{name}-{i}", result))
        if self.choose(2):
            own.reverse()  # results arrive in any order
        for line, call, result in own:
            content = [{"type": "tool_result", "tool_use_id": call, "content": result}]
            last = self.add(line, **user_line(content))
        return last


def shown(message: dict[str, Any]) -> str:
    if message["role"] == "assistant":
        calls = [json.loads(one["function"]["arguments"])["x"] for one in message.get("tool_calls", ())]
        texts = message["content"].replace("\n\n", "|")
        return f"assistant {texts} {' '.join(f'call {one}' for one in calls)}"
    return f"{message['role']} {message['content']}"


@given(st.lists(conversations(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_every_action_has_the_messages_that_came_before_it(
    tmp_path_factory: pytest.TempPathFactory, roots: list[User], random: Any
) -> None:
    """Branches, split responses, parallel calls as a chain or as siblings, lines between, several roots.

    A root may be a side chain: a conversation of its own. A hidden line is a message, as a reminder is.
    """
    writer = Writer(lambda n: random.randrange(n))
    writer.lines.append({"type": "summary", "summary": "s", "leafUuid": "x"})
    for root in roots:
        writer.is_side_chain = bool(random.randrange(2))
        writer.write(root, None)
    found, tally = read_log(tmp_path_factory.mktemp("log") / "s.jsonl", writer.lines)
    made = Counter((tuple(map(shown, acted.messages)), shown(acted.observed)) for acted in found)
    assert made == Counter(one for root in roots for one in expected(root))
    assert not tally.actions
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


def contents(acted: Acted) -> list[str]:
    return [message["content"] for message in acted.messages]


A, B = user("1", None, "a"), reply("2", "1", text("b"))


def test_the_last_line_may_be_torn_and_no_other(tmp_path: Path) -> None:
    lines = "".join(json.dumps(one) + "\n" for one in [A, B])
    for torn in ('{"type":"user","uu', '{"type":"user","text":"\udce4\udcf6'):
        found, tally = read_log(tmp_path / "s.jsonl", lines + torn)
        assert len(found) == 1 and tally.lines == {"torn last line of a file that is being written": 1}
    for torn in ('{"type":"us\n' + lines, lines + '{"type":"user"\n', '{"type":"us'):
        with pytest.raises(DataError, match=r"^s\.jsonl:\d: the line is not JSON"):
            read_log(tmp_path / "s.jsonl", torn)


def test_after_a_compact_boundary_the_model_sees_the_summary(tmp_path: Path) -> None:
    boundary: Line = {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None}
    boundary |= {"logicalParentUuid": "2"}
    summary = user("s", "b", "what happened", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    before = [user("1", None, "first"), reply("2", "1", text("ok"))]
    found, _ = read_log(tmp_path / "s.jsonl", [*before, boundary, summary, reply("3", "s", text("on"))])
    assert [contents(acted) for acted in found] == [["first"], ["what happened"]]


def test_messages_that_a_boundary_kept_follow_the_summary_from_then_on(tmp_path: Path) -> None:
    lines = [
        user("1", None, "first"),
        reply("2", "1", text("one")),
        user("3", "2", "kept"),
        reply("4", "3", text("two")),
        {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None},
        user("s", "b", "summary", isCompactSummary=True),
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


def test_a_result_that_is_an_error_says_so(tmp_path: Path) -> None:
    lines = [A, reply("2", "1", use("c")), user("3", "2", [result("c", "x", is_error=True)])]
    found, _ = read_log(tmp_path / "s.jsonl", [*lines, reply("4", "3", text("on"))])
    assert contents(found[1]) == ["a", "", f"{FAILED_TOOL}\nx"]


def test_a_text_that_another_line_has_in_part_is_one_text(tmp_path: Path) -> None:
    parts = [
        reply(str(i), "1", text(one), name="m") for i, one in enumerate(("I lo", "I look", "I look", "I"), 2)
    ]
    (acted,), tally = read_log(tmp_path / "s.jsonl", [A, *parts])
    assert acted.observed["content"] == "I look"
    assert tally.lines == {"text that another line of its response has": 3}


def test_two_calls_with_one_id_have_their_own_results(tmp_path: Path) -> None:
    """And a result that comes after the next response does not belong to the history of that response."""
    lines = [A, reply("2", "1", use("c")), user("3", "2", [result("c", "one")])]
    lines += [reply("4", "3", use("c")), user("5", "4", [result("c", "two")]), reply("6", "5", text("on"))]
    found, _ = read_log(tmp_path / "s.jsonl", lines)
    assert [contents(acted) for acted in found] == [["a"], ["a", "", "one"], ["a", "", "one", "", "two"]]
    late = [A, reply("2", "1", use("c")), reply("3", "2", use("d")), user("4", "3", [result("c", "one")])]
    found, tally = read_log(tmp_path / "s.jsonl", late)
    assert [contents(acted) for acted in found] == [["a"]]
    assert tally.actions == {"a tool call before it has no result, or a result has no call": 1}


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WEB = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
SYNTHETIC = reply("2", "1", text("API Error"), model="<synthetic>")
LEFT_OUT: list[tuple[str, list[Line], list[list[str]]]] = [
    ("it needs content of the type image", [user("1", None, [PNG]), B], []),
    ("it needs content of the type server_tool_use", [A, reply("2", "1", WEB)], []),
    ("it needs content of the type image",
        [A, reply("2", "1", use("c")), user("3", "2", [result("c", [PNG])]), reply("4", "3", text("d"))],
        [["a"]]),
    ("the action is empty", [A, reply("2", "1", {"type": "thinking", "thinking": "hm"})], []),
    ("it was cut at the length limit", [A, reply("2", "1", text("b"), stop_reason="max_tokens")], []),
    ("its history is not in the file", [user("1", "gone", "a"), B], []),
    ("its task is not in the log", [reply("2", None, text("b"))], []),
    ("invention", [A, B, {"type": "invention", "uuid": "9", "parentUuid": "2"}], [["a"]]),
    ("assistant line that the model did not write", [A, SYNTHETIC, reply("3", "2", text("b"))], [["a"]]),
    ("line that is in the file twice", [A, B, A], [["a"]]),
    (  # such as a reminder, of which only an attachment is in the log
        "what it answers is not in the log: the message before it is the model's own",
        [A, B, reply("3", "2", text("c"))],
        [["a"]],
    ),
    (
        "a tool call before it has no result, or a result has no call",
        [A, reply("2", "1", use("c")), user("3", "2", "b"), reply("4", "3", text("d"))],
        [["a"]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "lines", "expected"), LEFT_OUT)
def test_what_cannot_be_replayed_is_left_out_and_counted(
    tmp_path: Path, reason: str, lines: list[Line], expected: list[list[str]]
) -> None:
    found, tally = read_log(tmp_path / "s.jsonl", lines)
    assert [contents(acted) for acted in found] == expected
    assert (tally.actions or tally.lines) == {reason: 1}


WRONG: list[tuple[Line, str]] = [
    ({"type": "user", "uuid": "9", "parentUuid": "2"}, "3: message is None"),
    ({"type": "user", "parentUuid": "2", "message": {}}, "3: uuid is None"),
    (user("9", "9", "x"), "4: its parentUuid leads back to itself"),
    (
        user("1", None, "other"),
        "3: its uuid is that of s.jsonl:1, which has another parent or another message",
    ),
]


@pytest.mark.parametrize(("line", "problem"), WRONG)
def test_a_wrong_line_is_an_error_that_names_file_and_line(tmp_path: Path, line: Line, problem: str) -> None:
    with pytest.raises(DataError) as refused:
        read_log(tmp_path / "s.jsonl", [A, B, line, reply("10", "9", text("c"))])
    assert str(refused.value).startswith(f"s.jsonl:{problem}")


def test_half_of_a_character_is_replaced(tmp_path: Path) -> None:
    (acted,), _ = read_log(tmp_path / "s.jsonl", [A, reply("2", "1", text("x\ud800y"))])
    assert acted.observed["content"] == "x\ufffdy"
