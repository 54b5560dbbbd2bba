"""Replayed pairs whose sides are tool calls, as a parquet file of recorded traces has them."""

import json
from typing import Any

import pytest

from composer_plugins.adapters.trl_mixin.upstream import encode_replayed
from composer_plugins.errors import DataError
from parity_tests.rigs import tool_calls
from parity_tests.rigs.tiny import batch, logged, shown
from parity_tests.rigs.tool_calls import PAIR, PROMPT, READ, of_pairs


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the template's documentation has them: no key that is None, arguments as an object."""
    made = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        for one in kept.get("tool_calls", []):
            kept["content"] = ""
            function = {**one["function"], "arguments": json.loads(one["function"]["arguments"])}
            kept["tool_calls"] = [{**one, "function": function}]
        made.append(kept)
    return made


@pytest.mark.parametrize("tools", [json.dumps(READ), READ, None])
def test_a_pair_is_rendered_with_the_tools_of_its_row(tools: Any) -> None:
    made = of_pairs(tools=tools)
    inputs, words = batch(made), made.processing_class
    for side in ("chosen", "rejected"):
        given = {"tools": READ} if tools else {}
        text = words.apply_chat_template(plain([*PROMPT, *PAIR[side]]), tokenize=False, **given)
        assert shown(made, inputs, f"replay_{side}") == text
        length = int(inputs[f"replay_{side}_mask"][0].sum())
        completion = words.decode(inputs[f"replay_{side}_ids"][0, -length:])
        assert completion.count("<tool_call>") == 1 and "no such file" not in completion
        assert ('"name": "read", "parameters"' in text) == bool(tools)


def test_the_policys_prompt_is_rendered_as_that_of_the_pairs() -> None:
    """Some templates crash on arguments that are text, and others show them with quotes."""
    made = of_pairs(tools=None)
    inputs = batch(made)
    ids = inputs["prompt_ids"][0][inputs["prompt_mask"][0].bool()].tolist()
    assert ids == encode_replayed(made, PAIR | {"tools": None}, [PAIR["chosen"]])[0]


CONTENT = "{% for m in messages %}{{ m.content }}|{% endfor %}"
NAME = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}A:{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}A:<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CONTENT, "chat template: it does not show the call of read; set one that shows tool calls, or remo"),
        (NAME, "chosen: it differs from rejected, and their tokens are equal; set a chat template that"),
        ("{{ raise_exception('no') }}", "chat template: it does not take this conversation .TemplateError"),
        (THINKS, "chat template: its prompt ends with <think>, and it drops the reasoning from a completion"),
    ],
)
def test_a_template_that_loses_a_tool_call_is_an_error(template: str, message: str) -> None:
    words = tool_calls.tokenizer()
    words.chat_template = template
    with pytest.raises(DataError, match=f"row 0, {message}"):
        of_pairs(arguments={"processing_class": words})


def test_the_trainers_tools_are_shown_unless_the_row_has_its_own() -> None:
    def look(path: str) -> str:
        """Look at a file.

        Args:
            path: the file
        """
        return path

    made = of_pairs(arguments={"tools": [look]})
    for tools, is_shown in ((None, True), ("[]", False), (PAIR["tools"], False)):
        prompt, _ = encode_replayed(made, PAIR | {"tools": tools}, [PAIR["chosen"]])
        assert ('"name": "look"' in made.processing_class.decode(prompt)) is is_shown


def test_the_margin_of_tool_calls_rises() -> None:
    margins = logged(of_pairs(max_steps=4), "composer/replay/rewards/margins")
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > margins[1] > 0
