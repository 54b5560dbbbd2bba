"""OpenAI chat logs: conversations, requests with their responses, and what is no such log."""

from pathlib import Path
from typing import Any

import pytest

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats.common import Acted, Tally
from parity_tests.rigs.replayed import read_log

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATION = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "assistant", "content": "done"},
]
FIRST = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
ACTION = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def read(folder: Path, *rows: Any) -> tuple[list[Acted], Tally]:
    return read_log(folder / "l.jsonl", rows)


def test_each_assistant_message_of_a_conversation_is_an_action(tmp_path: Path) -> None:
    (first, second), tally = read(tmp_path, {"messages": CONVERSATION, "tools": [TOOL], "id": 3})
    assert (first.messages, first.observed, first.tools) == (FIRST, ACTION, [TOOL])
    assert second.messages == [*FIRST, ACTION, CONVERSATION[3]]
    assert second.observed == {"role": "assistant", "content": "done"} and second.source == "l.jsonl:1"
    reasoning = "reasoning of an assistant message (left out of the states)"
    assert tally.lines == {"field 'id' of an OpenAI line": 1, reasoning: 1}


def test_each_choice_of_a_response_is_an_action_and_the_request_has_none(tmp_path: Path) -> None:
    choices = [
        {"finish_reason": finish, "message": {"role": "assistant", "content": content}}
        for content, finish in (("x", "stop"), ("y", "length"), ("z", "stop"))
    ]
    request = {"model": "m", "messages": CONVERSATION[:4], "tools": [TOOL]}
    failed = {"request": request, "response": {"error": {"message": "busy"}}}
    answered = {"response": {"choices": choices}, "reward": 1}
    for row in ({"request": request, **answered}, {**request, **answered}):
        found, tally = read(tmp_path, row, failed)
        assert [acted.observed["content"] for acted in found] == ["x", "z"]
        assert [acted.outcome for acted in found] == [1.0, 1.0]
        assert len({acted.key for acted in found}) == 2 and all(acted.tools == [TOOL] for acted in found)
        assert all(acted.messages == [*FIRST, ACTION, CONVERSATION[3]] for acted in found)
        assert tally.actions == {"it was cut at the length limit": 1}
        assert tally.lines["request that failed"] == 1


@pytest.mark.parametrize(("reward", "outcome"), [(0.5, 0.5), (True, 1.0), (None, None)])
def test_a_reward_is_the_outcome_of_all_actions(tmp_path: Path, reward: Any, outcome: float | None) -> None:
    found, _ = read(tmp_path, {"messages": CONVERSATION, "reward": reward})
    assert [acted.outcome for acted in found] == [outcome, outcome]


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
CUSTOM = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "custom"}]}
LEFT_OUT = [
    ([IMAGE, CONVERSATION[4]], "it needs content of the type image_url"),
    ([FIRST[1], CUSTOM], "it needs a tool call that is not a function call"),
]


@pytest.mark.parametrize(("messages", "reason"), LEFT_OUT)
def test_what_cannot_be_replayed_is_left_out(tmp_path: Path, messages: list[Any], reason: str) -> None:
    _, tally = read(tmp_path, {"messages": messages})
    assert tally.actions == {reason: 1}


WRONG_VALUE = "it is not as its format says"
WRONG: list[tuple[Any, str]] = [
    ([1], "the line is not a JSON object; correct or remove the line in a copy of the log"),
    ({"foo": 1}, f"{WRONG_VALUE} (KeyError: 'messages'); correct or remove the line in a copy of the log"),
    ({"messages": [3]}, f"{WRONG_VALUE} (AttributeError: "),
    ({"messages": [{"role": "alien"}]}, f"{WRONG_VALUE} (ValueError: a message has the role 'alien')"),
    ({"messages": [{"role": "tool", "content": "x"}]}, f"{WRONG_VALUE} (KeyError: 'tool_call_id')"),
    ({"messages": [], "tools": [3]}, f"{WRONG_VALUE} (TypeError: "),
    ({"messages": [], "reward": "high"}, f"{WRONG_VALUE} (TypeError: must be real number, not str)"),
    ({"messages": [], "reward": float("nan")}, f"{WRONG_VALUE} (ValueError: the reward is nan)"),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, {"messages": []}, row)
    assert str(refused.value).startswith(f"l.jsonl:2: {message}") and "\n" not in str(refused.value)
