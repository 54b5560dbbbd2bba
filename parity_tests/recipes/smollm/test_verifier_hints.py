"""Hints from the verifier: what is wrong with the policy's own reply, for each wrong reply."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from composer_plugins.adapters.trl_mixin.channels import HintChannel
from composer_plugins.recipes import tiny
from composer_plugins.recipes.codebook.run import Run
from composer_plugins.recipes.smollm.asking import Settings
from composer_plugins.recipes.smollm.comparing import Comparison
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.run import train
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, Task, make_task, question

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


def test_the_feedback_of_reasoning_gym_has_the_points_of_its_own_verifier() -> None:
    task = make_task("chain_sum")
    row = next(row for row in task.held_out if row["answer"] == "6")
    said = "The verifier gives the reply 0.077 points, and a right reply 1. The right answer is 6."
    assert task.feedback("12 or 16 or 3", row) == said


@pytest.fixture
def even() -> Task:
    """A few questions, to which every reply with an even number of characters is right.

    The feedback quotes a wrong reply, to show which one it is about.
    """
    rows = make_task(ARITHMETIC).rows[:4]

    def score(reply: str, answer: str) -> float:
        return float(len(reply) % 2 == 0)

    return Task("even", rows, rows[:2], score, lambda reply, row: f"Not '{reply}'.")


class Rollout(NamedTuple):
    """The rows of a generation batch."""

    rewards: list[float]
    has_hint: list[bool]
    teacher_prompts: list[str]
    replies: list[str]


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """What the hint channel made of each generation batch so far."""
    tensors, made = HintChannel.tensors, list[Rollout]()

    def recorded(self: Any, trainer: Any, rows: Any, prompts: Any, batch: Any, rewards: Any) -> Any:
        found = tensors(self, trainer, rows, prompts, batch, rewards)
        ids = (found["hint_prompt_ids"], batch["completion_ids"])
        texts = (trainer.processing_class.batch_decode(one, skip_special_tokens=True) for one in ids)
        made.append(Rollout(rewards.tolist(), found["hint_mask"].any(1).tolist(), *texts))
        return found

    monkeypatch.setattr(HintChannel, "tensors", recorded)
    return made


def test_the_rows_with_a_wrong_reply_have_a_hint_about_it(
    smollm: Loaded, even: Task, rollouts: list[Rollout], logs: list[dict[str, float]]
) -> None:
    """In two steps of four completions. A run of the policy loss alone samples the same first ones."""
    settings = Settings(steps=2, batch_size=4, hints="verifier")
    given = (0, smollm, even, [*even.rows])
    with tiny.quiet_libraries():
        made = train(("rl", "hint"), *given, settings, 0.0, lambda *_: None)
        alone = train(("rl",), *given, replace(settings, steps=1), 0.0, lambda *_: None)
    rewards = [reward for one in rollouts for reward in one.rewards]
    assert len(rewards) == 8 and set(rewards) == {0.0, 1.0}, "the replies are all alike"
    for one in rollouts:
        assert one.has_hint == [reward == 0 for reward in one.rewards]
        for has_hint, prompt, reply in zip(one.has_hint, one.teacher_prompts, one.replies, strict=True):
            assert (f"Not '{reply}'." in prompt) == has_hint
    assert [log["composer/hint/row_frac"] for log in logs[:2]] == [1 - reward for reward in made.rewards]
    assert alone.rewards == made.rewards[:1]


def test_the_hints_and_the_policy_are_conditions_of_a_run(tmp_path: Path, even: Task) -> None:
    worked = Comparison("m", Loaded(None, None), even, Settings(), tmp_path / "runs.jsonl")
    run = Run(("rl", "hint"), 0, [0.0], 0.0, 0.0, 1.0)
    worked.save(run, worked.settings)
    assert [*worked.finished(worked.settings)] == [run]
    for other in (Settings(hints="verifier"), Settings(policy="gspo"), Settings(num_iterations=2)):
        assert not [*worked.finished(other)]
