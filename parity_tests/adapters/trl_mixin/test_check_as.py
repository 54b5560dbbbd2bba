"""`check --as trl`: TRL's loss types, and subclasses of its trainer with a planted fault.

docs/writing_a_loss.md shows a test of a whole trainer, which finds a wrong division.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_TYPES
from composer_plugins.testing.conventions import check_as
from docs.generator.written import part
from parity_tests.rigs.paths import ROOT

CUT = "micro_batches_and_ranks_leave_the_gradient_alone"
MASKED = "masked_tokens_have_no_influence"

# Subclasses of TRL's trainer as users write them: a sound one, and others with one fault each


def own_loss(reduced: Callable[[Tensor, Tensor, Any], Tensor]) -> type[GRPOTrainer]:
    """A trainer with a loss per token, -A log pi, that `reduced` makes one number."""

    class OwnLoss(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logprobs = self._get_per_token_logps_and_entropies(model, ids, attention, mask.shape[1])[0]
            advantages = inputs["advantages"].reshape(len(mask), -1)
            return reduced(-advantages * logprobs, mask.bool(), self)

    return OwnLoss


class Ascending(GRPOTrainer):
    """A forgotten minus."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return -super()._compute_loss(model, inputs)


def masked(loss: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, loss, 0.0)


def mean_of_rows(loss: Tensor, mask: Tensor) -> Tensor:
    """The mean over completions of the mean over their tokens."""
    return (masked(loss, mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def steps(trainer: Any) -> Any:
    """The number of micro-batches of an optimizer step."""
    return trainer.current_gradient_accumulation_steps


Sound = own_loss(lambda loss, mask, t: mean_of_rows(loss, mask) / steps(t))
MeanOfTheMicroBatch = own_loss(lambda loss, mask, t: masked(loss, mask).sum() / mask.sum() / steps(t))
NotDivided = own_loss(lambda loss, mask, _: mean_of_rows(loss, mask))
OverPadding = own_loss(lambda loss, mask, t: masked(loss, mask).mean() / steps(t))
Unmasked = own_loss(lambda loss, mask, t: loss.mean() / steps(t))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_is_called_and_bnpo_alone_depends_on_the_cut(loss_type: str) -> None:
    report = check_as(loss_type, "trl")
    status = {outcome.check: outcome.status for outcome in report.outcomes}
    assert status["result_is_what_the_framework_takes"] == "passed", str(report)
    assert status[MASKED] == "passed", str(report)
    assert (status[CUT] == "failed") is (loss_type == "bnpo"), str(report)


def test_a_sound_subclass_passes_what_the_masks_of_trl_pass() -> None:
    assert not check_as(Sound, "trl", [CUT, MASKED, "more_padding_changes_nothing"]).findings


@pytest.mark.parametrize(
    ("trainer", "law", "words"),
    [
        (NotDivided, CUT, "2 micro-batches of 4 rows"),
        (OverPadding, "more_padding_changes_nothing", "with 3 more columns"),
        (Unmasked, MASKED, "not 0 where masked"),
        (Ascending, "descent_raises_the_tokens_with_positive_advantages", "and with its negative by"),
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
    part("docs/writing_a_loss.md", "trl").check()


PAGE = (ROOT / "docs/writing_a_loss.md").read_text()


def snippet(name: str) -> str:
    return PAGE.partition(f"```python\n# {name}\n")[2].partition("```")[0]


@pytest.mark.parametrize(("base", "passes"), [(GRPOTrainer, True), (MeanOfTheMicroBatch, False)])
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
