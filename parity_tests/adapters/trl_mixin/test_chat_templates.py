"""Replayed completions after a prompt that opens a tag for the model, as DeepSeek-R1's does."""

from importlib.resources import files
from typing import Any

import pytest
from datasets import Dataset

from composer_plugins.adapters.trl_mixin.upstream import encode_replayed
from parity_tests.rigs import tiny

QUESTION = [{"role": "user", "content": "a?"}]
# As R1's: the prompt ends with "<t>\n", and everything up to "</t>" is dropped from an answer.
OPENS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}\n"
    "{% else %}A:{{ m['content'].split('</t>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:<t>\n{% endif %}"
)


def with_template(template: str, **options: Any) -> Any:
    """A trainer whose tokenizer has this template, and tokens for the tags."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<t>", "</t>", "<think>", "</think>"])
    model = tiny.model()
    model.resize_token_embeddings(len(tokenizer))
    arguments = {"processing_class": tokenizer}
    return tiny.trainer(replay_weight=1.0, policy_model=model, arguments=arguments, **options)


def text_of(made: Any, completion: Any) -> str:
    """The completion after QUESTION, as the tokens say it."""
    return made.processing_class.decode(encode_replayed(made, {"prompt": QUESTION}, [completion])[1][0])


@pytest.fixture(scope="module")
def opens() -> Any:
    return with_template(OPENS)


@pytest.mark.parametrize(
    "completion",
    [
        "12</t>3",
        "<t>12</t>3",
        "<t>\n12</t>3",
        "12</t>3<eos>",
        [{"role": "assistant", "content": "12</t>3"}],
    ],
)
def test_a_completion_after_an_opened_tag_is_what_the_model_generates(opens: Any, completion: Any) -> None:
    """The prompt's own rendering ends with the tag, and the completion follows it."""
    assert text_of(opens, completion) == "12</t>3<eos>"


def test_pairs_with_reasoning_train(opens: Any) -> None:
    rows = [{"prompt": QUESTION, "chosen": "12</t>3", "rejected": "4</t>5"}] * 4
    made = with_template(
        OPENS, dataset=Dataset.from_list(rows), scripted=False, policy_weight=0.0, max_steps=3
    )
    losses = tiny.logged(made, "composer/replay/loss")
    assert losses[-1] < losses[0]
    assert tiny.shown(made, tiny.batch(made), "replay_chosen") == "U:a?\nA:<t>\n12</t>3<eos>"


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3_5_think"])
def test_released_templates_that_open_think_work(name: str) -> None:
    """From TRL's copies of them. Qwen's keeps the reasoning of an answer, R1's drops it."""
    made = with_template((files("trl") / "chat_templates" / f"{name}.jinja").read_text())
    assert "".join(text_of(made, "12\n</think>\n\n3").split()).startswith("12</think>3")
