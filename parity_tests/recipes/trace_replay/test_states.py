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


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(one) for key, one in reversed(value.items())}
    return [reordered(one) for one in value] if isinstance(value, list) else value


@given(MESSAGES, st.none() | MESSAGES)
def test_an_id_does_not_depend_on_the_order_of_keys(messages: Any, tools: Any) -> None:
    name = state_id(messages, tools)
    assert name == state_id(reordered(messages), reordered(tools))
    assert len(name) == 16 and set(name) <= set("0123456789abcdef")
    assert name != state_id([*messages, {"role": "user"}], tools)
    assert name != state_id(messages, [*(tools or []), {"name": "f"}])


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
