"""The comparison of policy losses: replies of older weights, one step of each, and what a stranger types."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.smollm import policies
from composer_plugins.recipes.smollm.asking import Settings
from composer_plugins.recipes.smollm.comparing import Comparison
from composer_plugins.recipes.smollm.model import Loaded
from composer_plugins.recipes.smollm.older_rollouts import OlderRolloutsTrainer
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, Task, make_task
from parity_tests.rigs.first_step import logprobs
from parity_tests.rigs.paths import ROOT

RECORDED = Path(__file__).parent / "recorded" / "policies" / "runs.jsonl"


def by_length(reply: str, answer: str) -> float:
    """A reward that differs within a group, so that every step moves the weights."""
    return float(len(reply))


@pytest.fixture
def compared(smollm: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """A comparison on a few questions, which the command gets in place of its own."""
    whole = make_task(ARITHMETIC)
    task = Task(whole.name, whole.rows[:8], whole.held_out[:4], by_length)
    settings = Settings(steps=3, batch_size=4, max_completion_length=4, learning_rate=1e-4)
    made = Comparison("SmolLM2", smollm, task, settings, tmp_path / "runs.jsonl")
    monkeypatch.setattr(Comparison, "prepared", lambda *_: made)
    return made


def test_replies_of_age_2_are_those_of_the_weights_of_2_steps_ago(
    smollm: Loaded, compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, first = list[dict[str, Any]](), smollm.model.lm_head.weight
    original = OlderRolloutsTrainer._generate_and_score_completions

    def keep(self: OlderRolloutsTrainer, inputs: Any) -> dict[str, Any]:
        before = self.model.lm_head.weight.detach().clone()
        output = original(self, inputs)
        assert self.model.lm_head.weight.equal(before)
        batches.append(output | {"is_first": before.equal(first)})
        return output

    monkeypatch.setattr(OlderRolloutsTrainer, "_generate_and_score_completions", keep)
    words = ["--policies", "dapo", "--ages", "2", "--seeds", "0", "--out", str(tmp_path)]
    result = CliRunner().invoke(policies.app, words)
    assert result.exit_code == 0, result.output
    assert [one["is_first"] for one in batches] == [True, False, False]
    with torch.no_grad():  # all three were sampled from the weights before the training
        for batch in batches:
            for prompt, asked, reply, kept, old in zip(
                *(batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
                batch["old_per_token_logps"],
                strict=True,
            ):
                tokens = reply[kept.bool()].tolist()
                right = logprobs(smollm.model, prompt[asked.bool()].tolist(), tokens)
                torch.testing.assert_close(old[: len(tokens)], right, rtol=1e-4, atol=1e-4)


def test_a_command_that_was_interrupted_goes_on_where_it_was(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--ages", "0,1", "--seeds", "0", "--out", str(tmp_path)]
    part = CliRunner().invoke(policies.app, [*words, "--policies", "gspo"])
    assert part.exit_code == 0, part.output
    whole = CliRunner().invoke(policies.app, [*words, "--policies", "gspo,dppo_tv"])
    assert whole.exit_code == 0 and whole.output.count("1 of 1 runs are in") == 2, whole.output
    lines = [json.loads(line)["conditions"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(one["policy"], one["age"]) for one in lines] == [
        ("gspo", 0),
        ("gspo", 1),
        ("dppo_tv", 0),
        ("dppo_tv", 1),
    ]
    assert (tmp_path / policies.PICTURE).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "gspoo"], "--policies: unknown policy loss 'gspoo'; did you mean 'gspo'"),
        (["--ages", "0,x"], "--ages: it has 'x'"),
        (["--ages", "17"], "--ages: it has '17'"),
    ],
)
def test_a_wrong_word_is_an_error_before_the_model_is_loaded(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(policies.app, words, catch_exceptions=False)
    assert message in str(error.value)


def test_the_table_of_the_readme_is_that_of_the_recorded_runs() -> None:
    readme = (ROOT / "recipes" / "smollm" / "README.md").read_text()
    for name in policies.POLICIES:
        cells = []
        for steps, age, seeds in ((15, 0, 2), (15, 4, 2), (40, 4, 1)):
            settings = Settings(steps=steps, policy=name, age=age)
            task: Any = SimpleNamespace(name=ARITHMETIC)
            start: Any = None  # no run is trained
            recorded = Comparison("SmolLM2-135M-Instruct", start, task, settings, RECORDED).finished()
            runs = sorted(recorded, key=lambda run: run.seed)
            assert [run.seed for run in runs] == [*range(seeds)]
            cells += [fmean(run.final_reward for run in runs), *(run.greedy_after for run in runs)]
        assert f"| `{name}` | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in readme
