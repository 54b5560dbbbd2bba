"""OpenAI chat logs and rollouts of verifiers, and what is no log."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.errors import ComposerError, ConfigError, DataError
from composer_plugins.recipes.trace_replay.formats import log_files, read_logs, read_tools
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


def read(path: Path, *rows: Any) -> tuple[list[Acted], Tally]:
    return read_log(path, rows)


def test_each_assistant_message_of_a_conversation_is_an_action(tmp_path: Path) -> None:
    row = {"messages": CONVERSATION, "tools": [TOOL], "id": 3}
    (first, second), tally = read(tmp_path / "l.jsonl", row)
    assert (first.messages, first.observed, first.tools) == (FIRST, ACTION, [TOOL])
    assert second.messages == [*FIRST, ACTION, CONVERSATION[3]]
    assert second.observed == {"role": "assistant", "content": "done"} and second.source == "l.jsonl:1"
    reasoning = "reasoning of an assistant message (left out of the states)"
    assert tally.lines == {"field 'id' of an OpenAI record": 1, reasoning: 1}


def test_of_a_request_and_its_response_each_choice_is_an_action(tmp_path: Path) -> None:
    choices = [
        {"finish_reason": finish, "message": {"role": "assistant", "content": content}}
        for content, finish in (("x", "stop"), ("y", "length"), ("z", "stop"))
    ]
    request = {"model": "m", "messages": CONVERSATION[:4], "tools": [TOOL]}
    failed = {"request": request, "response": {"error": {"message": "busy"}}}
    for given in (choices, [{"index": i, **choice} for i, choice in enumerate(choices)]):
        row = {"request": request, "response": {"choices": given}}
        found, tally = read(tmp_path / "l.jsonl", row, failed)
        assert [acted.observed["content"] for acted in found] == ["x", "z"]
        assert len({acted.key for acted in found}) == 2 and all(acted.tools == [TOOL] for acted in found)
        assert all(acted.messages == [*FIRST, ACTION, CONVERSATION[3]] for acted in found)
        assert tally.actions == {"it was cut at the length limit": 1}
        assert tally.lines["request that failed"] == 1


FLAT = {"id": "c", "name": "f", "arguments": '{"x":1}'}


def rollout(**rest: Any) -> dict[str, Any]:
    completion = [{**CONVERSATION[2], "tool_calls": [FLAT]}, *CONVERSATION[3:]]
    row = {"example_id": 0, "prompt": CONVERSATION[:2], "completion": completion, "reward": 0.5}
    return {**row, "is_truncated": False, "tool_defs": [TOOL["function"]], **rest}


def test_a_rollout_up_to_verifiers_0_3(tmp_path: Path) -> None:
    (first, second), _ = read(tmp_path / "results.jsonl", rollout())
    assert (first.messages, first.observed, first.tools) == (FIRST, ACTION, [TOOL])
    assert (first.outcome, second.outcome, second.observed["content"]) == (0.5, 0.5, "done")
    as_text = [{**CONVERSATION[2], "tool_calls": [json.dumps(FLAT)]}]  # as verifiers 0.1 wrote a call
    (only,), _ = read(tmp_path / "results.jsonl", rollout(completion=as_text))
    assert only.observed == ACTION
    (only,), tally = read(tmp_path / "results.jsonl", rollout(is_truncated=True))
    assert only.observed == ACTION and tally.actions == {"it was cut at the length limit": 1}


def test_an_assistant_message_of_the_prompt_is_no_action(tmp_path: Path) -> None:
    shots = [CONVERSATION[1], {"role": "assistant", "content": "example"}, CONVERSATION[1]]
    found, _ = read(tmp_path / "results.jsonl", rollout(prompt=shots))
    assert [len(acted.messages) for acted in found] == [3, 5]


def test_the_steps_of_a_trajectory_have_the_messages_of_each_request(tmp_path: Path) -> None:
    steps = [
        {"prompt": CONVERSATION[:2], "completion": [ACTION]},
        {"prompt": [{"role": "user", "content": "short"}], "completion": [CONVERSATION[4]]},
    ]
    found, _ = read(tmp_path / "results.jsonl", rollout(trajectory=steps))
    assert [acted.messages for acted in found] == [FIRST, [{"role": "user", "content": "short"}]]


def test_a_rollout_with_an_error_or_without_messages_is_left_out(tmp_path: Path) -> None:
    rows = rollout(error={"error": "x"}), rollout(prompt="1+1=", completion="2"), rollout(reward=None)
    found, tally = read(tmp_path / "results.jsonl", *rows)
    assert [acted.outcome for acted in found] == [None, None]
    assert tally.lines["rollout that ended with an error"] == 1
    assert tally.lines["rollout without chat messages"] == 1


def trace(**rest: Any) -> dict[str, Any]:
    nodes = [
        {"message": FIRST[0], "tools": [TOOL["function"]]},
        {"message": FIRST[1], "parent": 0},
        {"message": {"role": "assistant", "tool_calls": [FLAT]}, "parent": 1, "sampled": True},
        {"message": CONVERSATION[3], "parent": 2},
        {"message": {"role": "assistant", "content": "done"}, "parent": 3, "sampled": True},
        {"message": {"role": "assistant", "content": "other"}, "parent": 1, "sampled": True},
        {"message": {"role": "assistant", "content": "given"}, "parent": 1},
    ]
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.25}}
    return {"version": 1, "ok": True, "nodes": nodes, "calls": [], "rewards": rewards, **rest}


def episode(*traces: Any) -> dict[str, Any]:
    return {"id": "e", "env": {"id": "x"}, "task": {"type": "T", "data": {}}, "ok": True, "traces": [*traces]}


def test_an_episode_of_verifiers_0_4(tmp_path: Path) -> None:
    (first, second, third), _ = read(tmp_path / "traces.jsonl", episode(trace()))
    assert (first.messages, first.observed, first.tools) == (FIRST, ACTION, [TOOL])
    assert second.messages == [*FIRST, ACTION, CONVERSATION[3]]
    assert third.messages == FIRST and third.observed["content"] == "other"
    assert [acted.outcome for acted in (first, second, third)] == [0.75] * 3
    cut = trace(rewards={"right": None}, calls=[{"node": 4, "finish_reason": "length"}])
    found, tally = read(tmp_path / "traces.jsonl", episode(cut), episode(trace(ok=False)))
    assert [acted.outcome for acted in found] == [None, None]
    assert tally.actions == {"it was cut at the length limit": 1}
    assert tally.lines == {"rollout that ended with an error": 1}


def nodes(parent: int) -> list[Any]:
    return [{"message": FIRST[1], "parent": parent, "sampled": True}]


FUNCTION_CALL = {"role": "assistant", "function_call": {"name": "f"}}
WRONG: list[tuple[Any, str]] = [
    ({"foo": 1}, "the line is of no known format, its fields are foo; give logs of one of these"),
    ([1], "the line is [1]; give logs with one JSON object in each line"),
    ({"messages": "x"}, "messages is 'x', and should be a list; correct the value in a copy of the log, or"),
    ({"messages": [3]}, "a message is 3, and should be an object; correct the value"),
    ({"messages": [{"role": "alien"}]}, "a message has the role 'alien'"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "a message has a block of"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id of a tool message is None"),
    ({"messages": [FUNCTION_CALL]}, "a message has a fun"),
    ({"messages": [], "tools": [3]}, "a tool is 3, and should be a function tool with a name; correct the v"),
    (rollout(reward="high"), "the reward is 'high', and should be a finite number; correct the value"),
    (rollout(reward=float("nan")), "the reward is nan"),
    (episode(trace(version=7)), "a trace has the version 7, known is 1"),
    (episode(trace(nodes=nodes(parent=5))), "a node has the"),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_what_no_format_has_is_an_error_that_names_the_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path / "l.jsonl", row)
    assert str(refused.value).startswith(f"l.jsonl:1: {message}") and "\n" not in str(refused.value)


NO_CALLS = {"role": "assistant", "content": "b", "tool_calls": True}


@pytest.mark.parametrize("row", [{"messages": [FIRST[1], NO_CALLS]}, rollout(reward=10**400)])
def test_a_value_of_another_type_is_an_error(tmp_path: Path, row: Any) -> None:
    with pytest.raises(DataError, match="^l.jsonl: a value in it is not of the type that its format says"):
        read(tmp_path / "l.jsonl", row)


def test_an_unknown_line_after_known_ones_is_an_error_too(tmp_path: Path) -> None:
    for known in ({"messages": CONVERSATION}, rollout(), episode(trace())):
        with pytest.raises(DataError) as refused:
            read(tmp_path / "l.jsonl", known, {"foo": 1})
        assert str(refused.value).startswith("l.jsonl:2: a line of")


def test_an_action_that_needs_an_image_or_another_kind_of_call_is_left_out(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    custom = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "custom"}]}
    rows = {"messages": [image, CONVERSATION[4]]}, {"messages": [FIRST[1], custom]}
    found, tally = read(tmp_path / "l.jsonl", *rows)
    reasons = "it needs content of the type image_url", "it needs a tool call that is not a function call"
    assert not found and set(tally.actions) == {*reasons}


def test_folders_are_searched_and_a_source_has_no_path_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "logs/deep").mkdir(parents=True)
    (tmp_path / "logs/empty.jsonl").touch()
    (tmp_path / "logs/notes.txt").write_text("no log")
    (tmp_path / "logs/deep/l.jsonl").write_text(json.dumps({"messages": CONVERSATION}))
    tally = Tally()
    found = list(read_logs(log_files([tmp_path / "logs"]), None, None, tally))
    assert {acted.source for acted in found} == {"logs/deep/l.jsonl:1"}
    assert tally.lines["file without a line"] == 1


def test_a_format_that_is_named_is_the_one_that_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"l\.jsonl:1: a Claude Code line has the unknown type None"):
        read_log(tmp_path / "l.jsonl", [{"messages": CONVERSATION}], "claude-code")
    with pytest.raises(ConfigError, match="known: claude-code, codex, openai, responses, verifiers"):
        read_log(tmp_path / "l.jsonl", [{"messages": CONVERSATION}], "klaude")


@pytest.mark.parametrize("content", ["", "[]", "[3]", '{"name": "f"}', "[{}]"])
def test_a_file_of_tools_has_function_tools(tmp_path: Path, content: str) -> None:
    (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ComposerError, match="give a JSON file with a list of OpenAI function tools"):
        read_tools(tmp_path / "tools.json")
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    assert read_tools(tmp_path / "tools.json") == [TOOL]


@pytest.mark.parametrize("row", [{"messages": CONVERSATION}, rollout()])
def test_tools_may_be_json_text(tmp_path: Path, row: dict[str, Any]) -> None:
    def with_tools(text: str) -> list[Acted]:
        return read(tmp_path / "l.jsonl", {**row, "tools": text, "tool_defs": text})[0]

    assert with_tools(json.dumps([TOOL]))[0].tools == [TOOL]
    with pytest.raises(DataError, match="l.jsonl:1: tools is the text '<tools>', which is not JSON"):
        with_tools("<tools>")


def test_a_response_beside_the_messages_is_read(tmp_path: Path) -> None:
    response = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x"}}]}
    row = {"messages": CONVERSATION[:4], "tools": [TOOL], "response": response}
    (only,), _ = read(tmp_path / "l.jsonl", row)
    assert only.observed["content"] == "x" and only.messages == [*FIRST, ACTION, CONVERSATION[3]]
    _, tally = read(tmp_path / "l.jsonl", {**row, "response": "x"})
    assert tally.lines["field 'response' of an OpenAI record, which has no choices (not read)"] == 1


def test_a_weight_of_0_is_counted(tmp_path: Path) -> None:
    messages = [*CONVERSATION[:4], {"role": "assistant", "content": "x", "weight": 0}]
    found, tally = read(tmp_path / "l.jsonl", {"messages": messages})
    assert len(found) == 2
    assert tally.lines["weight 0 of an assistant message (not used: it is an action like the others)"] == 1


def test_the_keys_of_two_files_with_one_name_differ(tmp_path: Path) -> None:
    """A file that is given twice, alone and in its folder, is one file."""
    for name, reward in (("run1", 1.0), ("run2", 0.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text(json.dumps(rollout(reward=reward)) + "\n")
    first, second = (tmp_path / name / "results.jsonl" for name in ("run1", "run2"))
    found = list(read_logs(log_files([first, second, tmp_path / "run1"]), None, None, Tally()))
    keys = [acted.key for acted in found]
    assert len(set(keys)) == 4 and keys[:2] == keys[4:] != keys[2:4]
