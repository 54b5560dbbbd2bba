"""`check --as trl`: TRL's loss types, and subclasses of its trainer with a planted fault.

docs/checking_a_loss.md shows a test of a whole trainer, which finds a wrong division.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trl import GRPOTrainer

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_TYPES
from composer_plugins.testing.conventions import check_as
from docs.generator.written import part
from parity_tests.rigs import faulty_trainers as faulty
from parity_tests.rigs.paths import ROOT

CUT = "micro_batches_and_ranks_leave_the_gradient_alone"
MASKED = "masked_tokens_have_no_influence"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_is_called_and_bnpo_alone_depends_on_the_cut(loss_type: str) -> None:
    report = check_as(loss_type, "trl")
    status = {outcome.check: outcome.status for outcome in report.outcomes}
    assert status["result_is_what_the_framework_takes"] == "passed", str(report)
    assert status[MASKED] == "passed", str(report)
    assert (status[CUT] == "failed") is (loss_type == "bnpo"), str(report)


def test_a_sound_subclass_passes_what_the_masks_of_trl_pass() -> None:
    assert not check_as(faulty.Sound, "trl", [CUT, MASKED, "more_padding_changes_nothing"]).findings


@pytest.mark.parametrize(
    ("trainer", "law", "words"),
    [
        (faulty.NotDivided, CUT, "2 micro-batches of 4 rows"),
        (faulty.OverPadding, "more_padding_changes_nothing", "with 3 more columns"),
        (faulty.Unmasked, MASKED, "not 0 where masked"),
        (faulty.Ascending, "descent_raises_the_tokens_with_positive_advantages", "and with its negative by"),
    ],
)
def test_a_planted_fault_of_a_subclass_is_named(trainer: type, law: str, words: str) -> None:
    (outcome,) = check_as(trainer, "trl", [law]).outcomes
    assert outcome.status == "failed"
    assert words in outcome.detail


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("grop", "check: unknown loss_type 'grop'; did you mean 'grpo'"),
        (int, "no trainer can be made of it: "),
        (lambda: None, "no trainer can be made of it: AttributeError: 'NoneType'"),
        (lambda logprobs, advantages, mask: logprobs, "no trainer can be made of it: TypeError"),
    ],
)
def test_what_is_no_trainer_is_an_error(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_as(given, "trl")


@pytest.mark.slow
def test_the_page_is_what_a_new_run_finds() -> None:
    part("docs/findings.md", "trl").check()


PAGE = (ROOT / "docs/checking_a_loss.md").read_text()


def snippet(name: str) -> str:
    return PAGE.partition(f"```python\n# {name}\n")[2].partition("```")[0]


@pytest.mark.parametrize(("base", "passes"), [(GRPOTrainer, True), (faulty.MeanOfTheMicroBatch, False)])
def test_the_test_of_the_page_finds_a_mean_of_the_micro_batch(
    base: type[GRPOTrainer], passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_trainer", module := ModuleType("my_trainer"))
    exec(snippet("my_trainer.py"), vars(module))
    monkeypatch.setattr(module, "MyTrainer", base)
    names: dict[str, Any] = {"__name__": "test_my_trainer"}
    exec(snippet("test_my_trainer.py"), names)
    if passes:
        names["test_micro_batches_leave_the_gradient_alone"](4)
    else:
        with pytest.raises(AssertionError):
            names["test_micro_batches_leave_the_gradient_alone"](4)
