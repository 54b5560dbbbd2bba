"""`check --trainer`: TRL's own GRPOTrainer, and subclasses with a planted fault."""

import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.adapters.trl_mixin.probe import SCRATCH, tiny_trainer, tokenizer
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_OPTIONS
from composer_plugins.testing.laws.of_trainers import option_law
from composer_plugins.testing.report import Report
from composer_plugins.testing.trainer_options import MOVES, NOT_MOVED
from composer_plugins.testing.trainer_runs import padded
from composer_plugins.testing.trainers import check_trainer
from parity_tests.rigs import faulty_trainers as faulty
from parity_tests.rigs.commands import error, invoke, output
from parity_tests.rigs.paths import ROOT

SAME, CUT = "two_runs_give_the_same_gradient", "micro_batches_leave_the_gradient_alone"
GENERATED = "steps_per_generation_leaves_the_gradient_alone"
COUNTED = "every_unmasked_token_has_a_gradient"
SIGN = "descent_raises_the_tokens_with_positive_advantages"
MASKED, PADDED = "masked_tokens_have_no_influence", "more_padding_changes_nothing"


def option_check(option: str) -> str:
    """The name of the law of one option."""
    return option_law(option).name


@cache
def model_folder() -> str:
    """The tiny model on disk: TRL loads the reference model from there when beta is not 0."""
    folder = str(Path(SCRATCH.name) / "model")
    tiny_trainer().model.save_pretrained(folder)
    return folder


def maker(cls: type[GRPOTrainer] = GRPOTrainer, config: type[GRPOConfig] = GRPOConfig, **own: Any) -> Any:
    """A user's make_trainer."""

    def make_trainer(**overrides: Any) -> GRPOTrainer:
        options = {"output_dir": SCRATCH.name, "use_cpu": True, "max_completion_length": 8}
        options |= {"num_generations": 4, "per_device_train_batch_size": 4, **own, **overrides}
        return cls(
            model=AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=config(**options),
            train_dataset=Dataset.from_list([{"prompt": text} for text in ("12", "3", "abc", "f0")]),
            processing_class=tokenizer(),
        )

    return make_trainer


def failed(report: Report) -> dict[str, str]:
    return {outcome.check: outcome.detail for outcome in report.findings}


def test_the_trainer_of_the_page_obeys_the_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/checking_a_loss.md").read_text()
    (source,) = [text.split("```")[0] for text in page.split("```python") if "def make_trainer" in text]
    exec(source, names := {})
    report = check_trainer(names["make_trainer"], only=[SAME, CUT, option_check("beta")])
    assert len(report.having("passed")) == 3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_trls_own_trainer_passes(loss_type: str) -> None:
    report = check_trainer(maker(loss_type=loss_type))
    assert report.passed, str(report)
    passed = {outcome.check for outcome in report.having("passed")}
    assert {SAME, COUNTED, SIGN, CUT, GENERATED, MASKED, PADDED} <= passed
    assert {option_check(name) for name in ("epsilon", "epsilon_high", "beta", "temperature")} <= passed


OURS = {"cls": ComposerGRPOTrainer, "config": ComposerGRPOConfig}


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        *({"loss_type": name} for name in ("bnpo", "cispo", "sapo", "luspo", "vespo")),
        {**OURS, "policy": "trl"},
        {**OURS, "policy": "cispo"},
        {**OURS, "policy": "dapo", "beta": 0.1},
        {"cls": faulty.LearnsFromGoodAnswers},
    ],
)
def test_the_sign_of_a_sound_trainer_is_right(options: dict[str, Any]) -> None:
    (outcome,) = check_trainer(maker(**options), [SIGN]).outcomes
    assert outcome[:2] == (SIGN, "passed"), outcome


def test_a_trainer_without_a_policy_loss_has_no_sign() -> None:
    (outcome,) = check_trainer(maker(faulty.WithoutAdvantages), [SIGN]).outcomes
    assert outcome.status == "not applicable" and "either sign" in outcome.detail


def test_bnpo_depends_on_the_micro_batches_as_its_documentation_says() -> None:
    assert set(failed(check_trainer(maker(loss_type="bnpo"), [CUT, MASKED, PADDED]))) == {CUT}


class Raises(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        raise ValueError("boom")


class WithoutKL(GRPOTrainer):
    """It forgets that beta is an option of the config."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        beta, self.beta = self.beta, 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta


@dataclass
class WithBonus(GRPOConfig):
    """A config with an option of the user's own, which no trainer reads."""

    length_bonus: float = field(default=0.5)


@pytest.mark.parametrize(
    ("make", "check", "words"),
    [
        (maker(faulty.MeanOfTheMicroBatch, loss_type="dapo"), CUT, "2 micro-batches of 8 rows"),
        (maker(faulty.NotDivided, loss_type="grpo"), CUT, "the gradient of 2 micro-batches of 8 rows"),
        (maker(faulty.OverPadding, loss_type="grpo"), PADDED, "3 more columns"),
        (maker(faulty.UnmaskedRatio, loss_type="grpo"), MASKED, "other tokens where masked"),
        (maker(faulty.NearlyDivided, loss_type="grpo"), CUT, "2 micro-batches of 8 rows"),
        (maker(faulty.UnmaskedTokens, loss_type="grpo"), MASKED, "other tokens where masked"),
        (maker(faulty.Random), SAME, "in a second call with the same inputs, the gradient"),
        (maker(faulty.RandomOfTorch), SAME, "in a second call with the same inputs, the gradient"),
        (maker(faulty.FirstTokens), COUNTED, "24 of 32 unmasked tokens is 0"),
        (maker(faulty.WithoutLastTokens), COUNTED, "8 of 32 unmasked tokens is 0"),
        (maker(faulty.Ascending, loss_type="dapo"), SIGN, "8 of 8 rows too little"),
        (
            maker(faulty.Ascending, loss_type="cispo"),
            SIGN,
            "8 of 8 rows too little",
        ),
        (maker(WithoutKL), option_check("beta"), "beta=0.0 and beta=0.1 give the same gradient"),
        (maker(faulty.MeanOfTheMicroBatch), option_check("epsilon"), "epsilon=0.2 and epsilon=0.05"),
        (maker(config=WithBonus), option_check("length_bonus"), "length_bonus=0.5"),
    ],
)
def test_a_planted_fault_of_a_subclass_is_found(make: Any, check: str, words: str) -> None:
    report = check_trainer(make, [check])
    assert words in failed(report)[check], str(report)


def test_a_denominator_of_the_generation_batch_is_found_where_a_step_is_half_of_it() -> None:
    report = check_trainer(maker(faulty.DividedByTheGeneration, loss_type="grpo"), [CUT, GENERATED])
    assert set(failed(report)) == {GENERATED}, str(report)


def test_a_loss_that_raises_fails_the_first_check_with_its_error() -> None:
    report = check_trainer(maker(Raises))
    (outcome,) = report.findings
    assert not report.having("passed")
    place = f"{os.path.relpath(__file__)}:{Raises._compute_loss.__code__.co_firstlineno + 1}"
    assert outcome[:3] == (SAME, "failed", f"ValueError: boom (at {place})")
    assert outcome.cause == "the loss itself raises this error"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "its loss is NoneType, and not a tensor"),
        ((torch.zeros(()), {}), "its loss is tuple, and not a tensor"),
        (torch.tensor(3), "its loss is of torch.int64"),
        (torch.zeros(()), "its loss has no gradient"),
    ],
)
def test_a_loss_that_is_not_one_number_is_one_error_with_its_place(returned: Any, words: str) -> None:
    class Wrong(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            return returned

    report = check_trainer(maker(Wrong))
    (outcome,) = report.findings
    place = f"{os.path.relpath(__file__)}:{Wrong._compute_loss.__code__.co_firstlineno}"
    assert words in outcome.detail and f"(_compute_loss at {place})" in outcome.detail
    assert outcome.cause == "return a tensor: one number, with a gradient"
    assert not report.having("passed")


def test_every_option_of_trls_loss_is_moved_or_has_a_reason() -> None:
    assert not set(MOVES) & set(NOT_MOVED)
    assert {*MOVES, *NOT_MOVED} == set(LOSS_OPTIONS)


def test_padding_is_masked_where_the_last_column_is_not() -> None:
    ones = torch.ones(2, 4, dtype=torch.long)
    mask = padded({"completion_ids": ones, "completion_mask": ones})["completion_mask"]
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0, 0]] * 2


def raises(**overrides: Any) -> GRPOTrainer:
    raise KeyError("model")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda **overrides: tiny_trainer(), "set the overrides over the options of your own"),
        (lambda: tiny_trainer(), r"make_trainer\(\*\*overrides\) -> GRPOTrainer"),
        (raises, "it fails .* every check sets: KeyError.*; correct the function: it must return a trainer"),
        (lambda **overrides: None, "it returned NoneType"),
    ],
)
def test_a_function_of_another_contract_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_trainer(make)


def test_an_unknown_law_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown law 'cut'"):
        check_trainer(maker(), ["cut"])


def test_the_command_exits_with_0_1_and_2(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(sound=maker(), wrong=maker(faulty.MeanOfTheMicroBatch))
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    output("check", "--trainer", "of_a_user:sound", "--only", CUT)
    wrong = invoke("check", "--trainer", "of_a_user:wrong", "--only", CUT)
    assert wrong.exit_code == 1 and "num_items_in_batch" in wrong.output
    error("check", "--trainer", "of_a_user:absent")
    error("check", "--trainer", "of_a_user:sound", "grpo")
