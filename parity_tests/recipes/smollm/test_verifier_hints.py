"""Hints from the verifier: what is wrong with the policy's own reply, for each wrong reply."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from composer_plugins.columns import HINT
from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.smollm.asking import Settings, subject_of
from composer_plugins.recipes.smollm.comparing import Comparison
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.run import train
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, Task, make_task, question
from composer_plugins.recipes.smollm.verifier_hints import rollouts

ROW = question("What is 7 * 8?", "56", "7 * 8 = 56")


@pytest.mark.parametrize(
    ("reply", "hint"),
    [
        ("It is 56", None),
        ("7 * 8 = 56.", None),
        ("It is 54", "7 * 8 is not 54, it is 56."),
        ("56 is\n 7 *  8", "7 * 8 is not 8, it is 56."),
        ("It is -56", "7 * 8 is not -56, it is 56."),
        ("It is 56.0", "The reply has the number 56.0. Write it as 56."),
        ("I don't know", "The reply has no number. 7 * 8 is 56."),
        ("", "The reply has no number. 7 * 8 is 56."),
    ],
)
def test_the_feedback_on_a_sum_names_the_wrong_number_and_the_right_one(reply: str, hint: str | None) -> None:
    assert make_task(ARITHMETIC).feedback(reply, ROW) == hint


@pytest.fixture
def even() -> Task:
    """A few questions, to which every reply with an even number of characters is right.

    The feedback quotes a wrong reply, to show which one it is about.
    """
    rows = make_task(ARITHMETIC).rows[:4]

    def score(reply: str, answer: str) -> float:
        return float(len(reply) % 2 == 0)

    return Task("even", rows, rows[:2], score, lambda reply, row: f"Not '{reply}'.")


def test_the_hint_of_a_wrong_reply_is_about_this_reply(smollm: Loaded, even: Task) -> None:
    """adapters/trl_mixin/test_hint.py takes such hints to the rows of a batch."""
    subject = subject_of(smollm, even, even.rows, Settings())
    prompts = [row["prompt"] for row in even.rows] * 2
    torch.manual_seed(0)
    found = rollouts(subject, even)(prompts, None)
    replies = subject.texts(found["completion_ids"])
    assert found[HINT] == [f"Not '{reply}'." if len(reply) % 2 else None for reply in replies]
    assert 0 < found[HINT].count(None) < len(replies), "the replies are all alike"
    assert found["prompt_ids"] == subject.encode(prompts)


def test_the_rows_with_a_wrong_reply_have_a_hint(
    smollm: Loaded, even: Task, logs: list[dict[str, float]]
) -> None:
    """In two steps of four completions. A run of the policy loss alone samples the same first ones."""
    settings = Settings(steps=2, batch_size=4, hints="verifier")
    given = (0, smollm, even, [*even.rows])
    with tiny.quiet_libraries():
        made = train(("rl", "hint"), *given, settings, 0.0, lambda *_: None)
        alone = train(("rl",), *given, replace(settings, steps=1), 0.0, lambda *_: None)
    assert 0 < sum(made.rewards) < 2, "the replies are all alike"
    assert [log["composer/hint/row_frac"] for log in logs[:2]] == [1 - reward for reward in made.rewards]
    assert alone.rewards == made.rewards[:1]


def test_the_hints_and_the_policy_are_conditions_of_a_run(tmp_path: Path, even: Task) -> None:
    worked = Comparison("m", Loaded(None, None), even, Settings(), tmp_path / "runs.jsonl")
    run = Run(("rl", "hint"), 0, [0.0], 0.0, 0.0, 1.0)
    worked.save(run, worked.settings)
    assert [*worked.finished(worked.settings)] == [run]
    for other in (Settings(hints="verifier"), Settings(policy="gspo"), Settings(num_iterations=2)):
        assert not [*worked.finished(other)]
