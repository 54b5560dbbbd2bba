"""`check --as trl`: TRL's loss types, and subclasses of its trainer with a planted fault."""

import pytest
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.testing.conventions import check_as
from parity_tests.rigs.faulty_trainers import Ascending, NotDivided, OverPadding, Sound, Unmasked

CUT = "micro_batches_and_ranks_leave_the_gradient_alone"
MASKED = "masked_tokens_have_no_influence"
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_is_called_and_bnpo_alone_depends_on_the_cut(loss_type: str) -> None:
    report = check_as(loss_type, "trl")
    status = {outcome.check: outcome.status for outcome in report.outcomes}
    assert status["result_is_what_the_framework_takes"] == "passed", str(report)
    assert status[MASKED] == "passed", str(report)
    assert (status[CUT] == "failed") is (loss_type == "bnpo"), str(report)


def test_a_sound_subclass_passes_what_the_masks_of_trl_pass() -> None:
    assert not check_as(Sound, "trl", [CUT, MASKED, "more_padding_changes_nothing"]).having("failed")


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


def test_errors_say_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match="TRL does not take loss_type='grop'"):
        check_as("grop", "trl")
    with pytest.raises(ConfigError, match="int is not a GRPOTrainer"):
        check_as(int, "trl")
    with pytest.raises(ConfigError, match="it returned NoneType, and not a GRPOTrainer"):
        check_as(lambda: None, "trl")


def test_a_function_of_another_convention_is_an_error() -> None:
    def of_torch(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return logprobs

    with pytest.raises(ConfigError, match="no trainer can be made of it: TypeError"):
        check_as(of_torch, "trl")
