"""States: their ids, and the file that holds them."""

from pathlib import Path

import pytest

from composer_plugins.errors import ComposerError
from composer_plugins.recipes.trace_replay.states import State, read_states, state_id, write_states


def test_an_id_does_not_depend_on_the_order_of_keys() -> None:
    messages, tools = [{"role": "user", "content": {"a": 1, "b": 2}}], [{"name": "f"}]
    name = state_id(messages, tools)
    assert name == state_id([{"content": {"b": 2, "a": 1}, "role": "user"}], tools)
    assert len({name, state_id(messages, None), state_id([*messages, *messages], tools)}) == 3
    assert len(name) == 16 and int(name, 16)


def test_states_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Also characters at which Python's splitlines would break a line."""
    path = tmp_path / "states.jsonl"
    messages = [{"content": "日本 é\n\r\x0b\x1c\x85\u2028\u2029", "a": [{"b": None}, 0.5, True]}]
    states = [
        State(state_id(messages, tools), messages, tools, {"role": "assistant"}, "f:1", outcome)
        for tools, outcome in ((None, None), ([{"name": "\u2028"}], -0.25))
    ]
    write_states(states, path)
    assert read_states(path) == states and [*tmp_path.iterdir()] == [path]


def refusal(path: Path) -> str:
    with pytest.raises(ComposerError) as refused:
        read_states(path)
    return str(refused.value).removeprefix(str(path))


def test_a_file_that_was_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "states.jsonl"
    assert refusal(path).startswith(": it cannot be read (FileNotFoundError")
    state = State(state_id([{"a": 1}], None), [{"a": 1}], None, {}, "f:1", None)
    write_states([state], path)
    text = path.read_text()
    changes = (('"a"', '"\\ud83d"'), ('"f:1"', "5"), ("1}", "[" * 9999))
    changed = (text.strip().replace(*change) for change in changes)
    for wrong in ("{}", "3", '{"messages": [], "prompt": ""}', text[:20], *changed):
        path.write_text(text + wrong + "\n")
        assert refusal(path).startswith(":2: it is no state: ")
