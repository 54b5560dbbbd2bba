"""hint_source="environment": the hint of a rollout is what its environment says after it."""

from typing import Any

import pytest

from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from parity_tests.rigs import by_rows, tool_calls
from parity_tests.rigs.tiny import assert_computes, batch, logged, shown
from parity_tests.rigs.tool_calls import HINT, Hinting, Plain

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")

OPTIONS = {"hint_weight": 1.0, "policy_weight": 0.0, "hint_source": "environment"}


class AllTurns(Hinting):
    turn = None


class ThirtiethTurn(Hinting):
    turn = 30


def trainer(environment: type, **options: Any) -> Any:
    arguments = {"environment_factory": environment, **options.pop("arguments", {})}
    return tool_calls.trainer(arguments=arguments, **{**OPTIONS, **options})


def marked(made: Any, inputs: dict[str, Any]) -> list[str]:
    """The text of the distilled tokens of each row."""
    rows = zip(inputs["completion_ids"], inputs["hint_mask"], strict=True)
    return [made.processing_class.decode(ids[mask]) for ids, mask in rows]


def rows_of(inputs: dict[str, Any]) -> list[int]:
    """The rows whose prompt says that they start with 1."""
    words = tool_calls.tokenizer()
    texts = [words.decode(ids) for ids in inputs["prompt_ids"]]
    return [i for i, text in enumerate(texts) if "Start with 1." in text]


@pytest.mark.parametrize(
    ("environment", "text"), [(Hinting, tool_calls.TURNS[1]), (AllTurns, "".join(tool_calls.TURNS))]
)
def test_the_tokens_of_the_turn_that_the_hint_is_about_are_distilled(environment: type, text: str) -> None:
    """Those of the tool are not, nor those of a rollout without a hint."""
    made = trainer(environment)
    inputs = batch(made)
    hinted = rows_of(inputs)
    assert len(hinted) == 2
    found = marked(made, inputs)
    assert [found[i] for i in hinted] == [text] * 2
    assert [one for i, one in enumerate(found) if i not in hinted] == [""] * 2
    for i in range(4):
        prompt = f"Guess. Start with {int(i in hinted)}."
        expected = f"{prompt}\n\n{HINT}" if i in hinted else prompt
        asked = shown(made, inputs, "hint_prompt", i)
        assert asked.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] == expected
        assert "guess" in asked.split("<|im_start|>user\n")[0]  # the tools of the environment


def test_only_the_tokens_of_that_turn_have_a_gradient() -> None:
    """The loss is the mean over rows of the mean JSD over the turn's tokens, from forward passes by row."""
    made = trainer(Hinting)
    inputs = batch(made)
    expected = by_rows.hint(made, inputs, made._hint.teacher.model, tokens=inputs["hint_mask"])
    assert_computes(made, inputs, expected, value=1e-5, gradient=1e-5)


def test_training_runs_and_logs_the_fraction_of_rollouts_with_a_hint() -> None:
    made = trainer(Hinting, max_steps=2, policy_weight=1.0, policy="grpo")
    assert logged(made, "composer/hint/row_frac") == [0.5, 0.5]


def test_a_column_is_a_hint_beside_an_environment() -> None:
    """The teacher's prompt has what reset said, and the column."""
    rows = [{"prompt": tool_calls.QUESTION, "start": i, "privileged_context": HINT} for i in range(2)]
    made = trainer(Plain, rows=rows, hint_source="column")
    inputs = batch(made)
    asked = shown(made, inputs, "hint_prompt")
    assert f"Start with {int(0 in rows_of(inputs))}.\n\n{HINT}" in asked
    assert marked(made, inputs) == ["".join(tool_calls.TURNS)] * 4


def test_feedback_of_an_environment_is_feedback_for_successful_rollouts() -> None:
    feedback = {"hint_source": "successful_rollout", "include_environment_feedback": True}
    rows = [{"prompt": tool_calls.QUESTION, "start": i, "privileged_context": None} for i in range(2)]
    made = trainer(AllTurns, rows=rows, **feedback)
    inputs = batch(made)
    asked = [shown(made, inputs, "hint_prompt", i) for i in range(4)]
    assert [f"unsuccessful earlier attempt:\n\n{HINT}" in one for one in asked] == [
        i in rows_of(inputs) for i in range(4)
    ]


def test_a_hint_that_does_not_fit_is_left_out_with_a_warning() -> None:
    whole = batch(trainer(Hinting))
    without_hint = int(whole["prompt_mask"].sum(1).max()) + whole["completion_ids"].shape[1]
    with pytest.warns(ComposerWarning, match=r"privileged_context: with the prompt it has \d+ tokens, and"):
        inputs = batch(trainer(Hinting, max_length=without_hint))
    assert not inputs["hint_mask"].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environment_factory": None, "tools": [Plain().guess]}, "the trainer has none; pass environment_f"),
        ({"environment_factory": Plain}, "Plain has no attribute privileged_context; set the"),
    ],
)
def test_what_cannot_work_is_an_error_before_training(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"hint_source: it is 'environment', and {message}"):
        trainer(Hinting, arguments=arguments)


def test_a_turn_that_the_completion_does_not_have_is_a_warning() -> None:
    with pytest.warns(ComposerWarning, match="hint_turn: it is 30, and the completion has 3 assistant turns"):
        assert not batch(trainer(ThirtiethTurn))["hint_mask"].any()


@pytest.mark.parametrize("turn", [True, -1, "1", 1.0])
def test_a_turn_that_is_no_index_is_an_error(turn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hinting, "turn", turn)
    with pytest.raises(DataError, match=f"hint_turn: it is {turn!r}; set the index of a turn, 0 for the fi"):
        batch(trainer(Hinting))


def test_feedback_comes_from_the_environments_that_have_it() -> None:
    """The row of the other environment has its column."""
    rows = [
        {"prompt": tool_calls.QUESTION, "start": 1, "environment": "a", "privileged_context": None},
        {"prompt": tool_calls.QUESTION, "start": 1, "environment": "b", "privileged_context": "Of the row."},
    ]
    feedback = {"hint_source": "successful_rollout", "include_environment_feedback": True}
    arguments = {"environment_factory": {"a": AllTurns, "b": Plain}}
    inputs = batch(made := trainer(AllTurns, rows=rows, arguments=arguments, **feedback))
    asked = [shown(made, inputs, "hint_prompt", i) for i in range(4)]
    assert (
        sorted((HINT in one, "Of the row." in one) for one in asked)
        == [(False, True)] * 2 + [(True, False)] * 2
    )


def test_an_environments_hint_that_is_not_read_is_a_warning() -> None:
    rows = [{"prompt": tool_calls.QUESTION, "start": 0, "privileged_context": HINT}] * 2
    with pytest.warns(ComposerWarning, match="hint_source: the environment has the attribute privileged_con"):
        trainer(Hinting, rows=rows, hint_source="column")
