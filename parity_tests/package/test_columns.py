"""What `columns` says of rows that are accepted and are probably a mistake."""

from types import SimpleNamespace
from typing import Any

import pytest

from composer_plugins.columns import (
    hint_notes,
    hint_of,
    pair_notes,
    pairs_of,
    special_tokens,
    template_messages,
    tools_of,
    warnings_of,
)
from composer_plugins.errors import DataError

ASKED = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": " 1+1? "}]},
]
NO_CALLS: dict[str, Any] = {"tool_calls": None}


@pytest.mark.parametrize(
    ("hint", "notes"),
    [
        (None, []),
        ("It is 2.", ["hint"]),
        (" NaN\n", ["hint", "absent 'NaN'"]),
        ([{"role": "user", "content": "null"}], ["hint", "absent 'null'"]),
        ("1+1?", ["hint", "prompt"]),
        ("None of these", ["hint"]),
    ],
)
def test_the_notes_of_a_hint(hint: Any, notes: list[str]) -> None:
    assert hint_notes({"privileged_context": hint}, ASKED) == notes
    assert hint_notes({"privileged_context": hint}, "1+1?") == notes


def test_a_hint_that_is_a_number_is_an_error() -> None:
    """NaN is what pandas writes for a hint that is missing."""
    with pytest.raises(DataError, match="privileged_context: it is nan; write a string, messages, or None"):
        hint_of({"privileged_context": float("nan")})


def test_the_notes_of_pairs_leave_out_those_with_a_weight_of_0() -> None:
    row = {"chosen": ["a", "b", "c"], "rejected": ["a", "b", [{"role": "assistant", "content": "<end>d"}]]}
    equal = ["pair", "equal"]
    for other, notes in (
        (row, [*equal, *equal, "pair", "token '<end>'"]),
        (row | {"n_teachers_agreeing": [1, 0, 0]}, equal),
        ({"chosen": None}, []),
    ):
        assert pair_notes(pairs_of(other), ASKED, ["<end>"]) == notes


def test_a_tool_call_is_the_text_of_a_side_without_content() -> None:
    def call(path: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": path}}]}]

    for chosen, rejected, notes in (("a", "b", []), ("a", "a", ["equal"]), ("<end>", "b", ["token '<end>'"])):
        pairs = pairs_of({"chosen": call(chosen), "rejected": call(rejected)})
        assert pair_notes(pairs, ASKED, ["<end>"]) == ["pair", *notes]
    with pytest.raises(DataError, match="rejected: it is empty"):
        pairs_of({"chosen": call("a"), "rejected": [{"role": "assistant", "content": "", **NO_CALLS}]})


@pytest.mark.parametrize("prompt", [" 1+1? ", [{"role": "system", "content": "Add."}, *ASKED]])
@pytest.mark.parametrize(
    ("chosen", "rejected", "notes"),
    [
        ("1+1? 2", "1+1? 3", ["pair", "repeats"]),
        ("\n1+1? 2", "1+1?", ["pair", "repeats"]),
        ("1+1? 2", "3", ["pair"]),  # one side may quote it
        ("2", "3", ["pair"]),
    ],
)
def test_a_pair_repeats_its_prompt_where_both_sides_begin_with_it(
    prompt: Any, chosen: str, rejected: str, notes: list[str]
) -> None:
    row = {"chosen": chosen, "rejected": rejected}
    assert pair_notes(pairs_of(row), prompt, []) == notes
    sides = {name: [{"role": "assistant", "content": text}] for name, text in row.items()}
    assert pair_notes(pairs_of(sides), prompt, []) == notes
    nothing_asked = [{"role": "system", "content": "Add."}]
    assert pair_notes(pairs_of(row), nothing_asked, []) == ["pair"]


def test_messages_for_a_template_have_no_key_that_is_none() -> None:
    """And arguments as an object; what has neither is as it was."""
    assert template_messages(ASKED[:1]) == ASKED[:1]
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    (made,) = template_messages([{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}])
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert made == {"role": "assistant", "content": "", "tool_calls": calls}


def test_text_beside_a_tool_call_is_kept_and_counts() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    said, silent = ({"role": "assistant", "content": text, "tool_calls": [call]} for text in ("a", None))
    assert [m["content"] for m in template_messages([said, silent])] == ["a", ""]
    assert pair_notes(pairs_of({"chosen": [said], "rejected": [silent]}), ASKED, []) == ["pair"]
    (blocks,) = template_messages([{"role": "user", "content": [{"type": "text", "text": "b"}]}])
    assert blocks["content"] == "b"


@pytest.mark.parametrize("arguments", ["[1, 2]", "5", '"x"', ["x"], "{", "[" * 100_000])
def test_arguments_that_are_no_object_are_an_error(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    said = "tool_calls: the arguments of f are .*; write an object, or its JSON"
    with pytest.raises(DataError, match=said):
        template_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(("value", "tools"), [(None, None), ("null", None), ("[]", []), ([], [])])
def test_a_row_may_have_no_tools(value: Any, tools: Any) -> None:
    """An empty list shows none; None leaves them to the trainer."""
    assert tools_of({"tools": value}, ASKED) == tools


def test_keys_that_a_parquet_file_has_added_are_left_out() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": None}}}}]
    (made,) = tools_of({"tools": tools}, ASKED) or []
    assert made["function"]["parameters"]["properties"] == {"a": {"type": "string"}}
    call = {"function": {"name": "f", "arguments": {"a": "1", "b": None}}}
    (message,) = template_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "1"}


def test_a_warning_has_the_number_the_first_row_and_what_to_do() -> None:
    notes = [[], ["pair", "pair", "token '<end>'"], ["pair", "token '<eos>'", "equal"]]
    assert list(warnings_of(notes, "replay", "data")) == [
        "data: in 1 of 3 pairs chosen equals rejected, first in row 2; "
        "remove these pairs, which teach nothing",
        "data: in 2 of 3 pairs chosen or rejected contains '<end>', first in row 1; "
        "write the text alone: the chat template adds its tokens",
    ]
    (none,) = warnings_of([[], []], "hint", "data")
    assert none.startswith("data: none of its 2 rows has a hint, so the hint loss is always 0; fill")
    assert list(warnings_of([["hint"]], "hint", "data")) == []


def test_special_tokens_are_the_tokenizers_and_those_that_were_added() -> None:
    def token(text: str, special: bool) -> Any:
        return type("Token", (), {"special": special, "__str__": lambda _: text})()

    added = {7: token("<turn>", special=True), 8: token("<think>", special=False)}
    tokenizer = SimpleNamespace(all_special_tokens=["<eos>"], added_tokens_decoder=added)
    assert special_tokens(tokenizer) == ["<eos>", "<turn>"]
