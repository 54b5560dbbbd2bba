"""States: their ids, and the file that holds them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_plugins.errors import ComposerError
from composer_plugins.recipes.trace_replay.states import State, read_states, state_id, write_states

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=8)
MESSAGES = st.lists(st.dictionaries(TEXT, JSON), max_size=3)


def test_an_id_does_not_depend_on_the_order_of_keys() -> None:
    messages, tools = [{"role": "user", "content": {"a": 1, "b": 2}}], [{"name": "f"}]
    name = state_id(messages, tools)
    assert name == state_id([{"content": {"b": 2, "a": 1}, "role": "user"}], tools)
    assert len({name, state_id(messages, None), state_id([*messages, *messages], tools)}) == 3
    assert len(name) == 16 and int(name, 16)


@given(MESSAGES, MESSAGES, st.none() | st.floats(-1, 1))
def test_states_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, messages: Any, tools: Any, outcome: float | None
) -> None:
    path = tmp_path_factory.mktemp("states") / "states.jsonl"
    states = [State(state_id(messages, tools), messages, tools, {"role": "assistant"}, "f:1", outcome)] * 2
    write_states(states, path)
    assert read_states(path) == states and [one.name for one in path.parent.iterdir()] == [path.name]


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
    for wrong in ("{}", "3", '{"messages": [], "prompt": ""}', text[:20]):
        path.write_text(text + wrong + "\n")
        assert refusal(path).startswith(":2: it is no state: ")
