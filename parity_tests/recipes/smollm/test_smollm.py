"""The recipe of SmolLM2: its tasks, its pairs, and two steps of the real model with all channels."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes import tiny
from composer_plugins.recipes.smollm.__main__ import app
from composer_plugins.recipes.smollm.asking import Settings, with_pairs
from composer_plugins.recipes.smollm.comparing import Comparison
from composer_plugins.recipes.smollm.model import Loaded, load
from composer_plugins.recipes.smollm.run import train
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, HELD_OUT, TRAINED, Task, make_task

TASKS = (ARITHMETIC, "chain_sum", "letter_counting")


@pytest.mark.parametrize("name", TASKS)
def test_a_right_reply_earns_1_and_no_held_out_question_is_trained(name: str) -> None:
    task = make_task(name)
    assert (len(task.rows), len(task.held_out)) == (TRAINED, HELD_OUT)
    asked = [{row["prompt"][1]["content"] for row in rows} for rows in (task.rows, task.held_out)]
    assert name != ARITHMETIC or not asked[0] & asked[1]
    for row in task.held_out:
        answer = row["answer"]
        assert row["privileged_context"].endswith(answer)
        for reply in (answer, f"It is {answer}"):
            assert task.score(reply, answer) == 1 and task.feedback(reply, row) is None
        for reply in ("", "no number", f"{answer} or 123456"):
            said = task.feedback(reply, row)
            assert task.score(reply, answer) == 0 and said is not None and said.endswith(f"{answer}.")
    assert task.rows == make_task(name).rows


def test_a_name_that_is_no_task_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--task: 'chain_smu' cannot be made"):
        make_task("chain_smu")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--policies", "dapo,gspoo", "unknown policy loss 'gspoo'"),
        ("--hints", "verifer", "unknown source of hints 'verifer'"),
    ],
)
def test_an_unknown_name_is_an_error(option: str, value: str, said: str, tmp_path: Path) -> None:
    error = CliRunner().invoke(app, [option, value, "--out", str(tmp_path)]).exception
    assert isinstance(error, ConfigError) and str(error).startswith(f"{option}: {said}; did you mean")


@pytest.fixture
def short() -> Task:
    """A task of a few questions."""
    whole = make_task(ARITHMETIC)
    return Task(whole.name, whole.rows[:8], whole.held_out[:4], whole.score)


def test_the_model_of_the_wheel_can_be_saved_and_read_again(smollm: Loaded, tmp_path: Path) -> None:
    for part in smollm:
        part.save_pretrained(tmp_path)
    again = load(str(tmp_path), "cpu")
    pairs = zip(smollm.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(one.equal(other) for one, other in pairs)
    with pytest.raises(ConfigError, match="--model: 'nowhere/at/all' cannot be loaded"):
        load("nowhere/at/all", "cpu")


def test_the_replay_channel_trains_on_pairs_of_a_right_and_a_wrong_reply(
    smollm: Loaded, short: Task, logs: list[dict[str, float]]
) -> None:
    rows = with_pairs(smollm, short, Settings(), seed=0)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in short.rows]
    paired = [row for row in rows if row["chosen"] is not None]
    for row in paired:
        assert short.score(row["chosen"], row["answer"]) > short.score(row["rejected"], row["answer"])
    settings = Settings(steps=2, batch_size=4, max_completion_length=2)
    with tiny.quiet_libraries():
        train(("replay",), 0, smollm, short, paired[:1], settings, 0.0, lambda step, reward: None)
    before, after = (log["composer/replay/rewards/margins"] for log in logs)
    assert before == pytest.approx(0, abs=1e-4) and after > 0.01


def test_each_policy_makes_a_run_and_a_finished_run_is_not_repeated(
    smollm: Loaded, short: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(*given: object) -> Comparison:
        settings = Settings(steps=2, num_iterations=2, batch_size=4)
        return Comparison("SmolLM2", smollm, short, settings, tmp_path / "runs.jsonl")

    monkeypatch.setattr(Comparison, "prepared", prepared)
    before = smollm.model.lm_head.weight.clone()
    words = ["--channels", "rl+hint+replay", "--policies", "dapo,gspo", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    for policy in ("dapo", "gspo"):
        (run,) = prepared().finished(replace(prepared().settings, policy=policy))
        assert run.channels == ("rl", "hint", "replay") and len(run.rewards) == 2
        assert (tmp_path / policy / "curves.png").stat().st_size > 1000
    assert smollm.model.lm_head.weight.equal(before)  # a copy was trained
    text = (tmp_path / "runs.jsonl").read_text()
    monkeypatch.setattr("composer_plugins.recipes.smollm.comparing.train", None)
    second = CliRunner().invoke(app, words)
    assert second.exit_code == 0 and second.output.count("1 of 1 runs are in") == 2
    assert (tmp_path / "runs.jsonl").read_text() == text
