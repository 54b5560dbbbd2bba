"""Replayed completions as chat templates make them: after an opened tag, and with or without an end."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest

from composer_plugins.adapters.trl_mixin.upstream import encode_replayed
from composer_plugins.errors import ComposerWarning
from parity_tests.rigs import tiny

QUESTION = [{"role": "user", "content": "a?"}]
# As R1's: the prompt ends with "<t>\n", and everything up to "</t>" is dropped from an answer.
OPENS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}\n"
    "{% else %}A:{{ m['content'].split('</t>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:<t>\n{% endif %}"
)


TOKENS = ["<t>", "</t>", "<think>", "</think>", "[gMASK]", "<sop>", "<|im_start|>", "assistant", "user"]
ENDS = ["<|user|>", "<|observation|>", "<|im_end|>"]  # of GLM's models and of Qwen's


def with_template(template: str, ends: Sequence[str] = (), **options: Any) -> Any:
    """A trainer whose tokenizer has this template, and tokens for the tags; `ends` end generation too."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens(TOKENS)
    tokenizer.add_tokens(ENDS, special_tokens=True)
    model = tiny.model()
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [1, *tokenizer.convert_tokens_to_ids(list(ends))]
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
    ["12</t>3", "<t>12</t>3", "<t>\n12</t>3", "12</t>3<eos>", [{"role": "assistant", "content": "12</t>3"}]],
)
def test_a_completion_after_an_opened_tag_is_what_the_model_generates(opens: Any, completion: Any) -> None:
    """The prompt's own rendering ends with the tag, and the completion follows it."""
    assert text_of(opens, completion) == "12</t>3<eos>"


def test_pairs_with_reasoning_train(opens: Any) -> None:
    rows = [{"prompt": QUESTION, "chosen": "12</t>3", "rejected": "4</t>5"}] * 4
    made = with_template(OPENS, dataset=rows, scripted=False, policy_weight=0.0, max_steps=3)
    losses = tiny.logged(made, "composer/replay/loss")
    assert losses[-1] < losses[0]
    assert tiny.shown(made, tiny.batch(made), "replay_chosen") == "U:a?\nA:<t>\n12</t>3<eos>"


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3_5_think"])
def test_released_templates_that_open_think_work(name: str) -> None:
    """From TRL's copies of them. Qwen's keeps the reasoning of an answer, R1's drops it."""
    made = with_template((files("trl") / "chat_templates" / f"{name}.jinja").read_text())
    assert "".join(text_of(made, "12\n</think>\n\n3").split()).startswith("12</think>3")


ENDLESS = (
    r"^train_dataset: in 4 of 4 pairs chosen or rejected does not end with a token that ends generation "
    r"\('<eos>', {}\), first in row 1; set a chat template that writes one after a completion"
)
GLM = r"'<\|user\|>', '<\|observation\|>', '<\|im_end\|>'"


def replayed(name: str, ends: Sequence[str], prompt: Any = QUESTION) -> Any:
    """Train on pairs under a template of TRL's, of which row 0 has weight 0."""
    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    pair = {"prompt": prompt, "chosen": "12", "rejected": "3"}
    rows = [{**pair, "n_teachers_agreeing": int(i > 0)} for i in range(5)]
    made = with_template(template, ends, dataset=rows, scripted=False, policy_weight=0.0)
    made.train()
    return made


def test_completions_that_never_end_are_a_warning() -> None:
    """GLM's template writes what ends generation before the next message, and after the last one nothing."""
    with pytest.warns(ComposerWarning, match=ENDLESS.format(GLM)):
        made = replayed("glm4moe", ENDS)
    assert tiny.shown(made, tiny.batch(made), "replay_chosen").endswith("\n12")


@pytest.mark.parametrize(
    ("name", "ends", "prompt"),
    [
        ("glm4moe_training", ENDS, QUESTION),
        ("qwen3", ENDS, QUESTION),  # white space follows the end
        ("qwen3_training", ENDS, QUESTION),
        ("glm4moe", ENDS, "a?"),  # no template makes it, and the end of sequence is added
    ],
)
def test_completions_that_end_are_no_warning(name: str, ends: list[str], prompt: Any) -> None:
    replayed(name, ends, prompt)  # a warning is an error here


def test_an_end_that_the_model_does_not_stop_at_is_a_warning() -> None:
    with pytest.warns(ComposerWarning, match=ENDLESS.format("'<.user.>'")):
        replayed("qwen3", ENDS[:1])
