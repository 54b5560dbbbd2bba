"""What Tinker's loss refuses: options, and data that cannot be right."""

from collections.abc import Callable
from operator import setitem
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import custom_loss, loss_fn, mark_pairs
from composer_plugins.errors import ComposerError, ComposerWarning
from composer_plugins.testing.conventions import check_as
from parity_tests.rigs.tinker_data import batch, changed, loss_and_gradients, without

# What `ask` and `ComposerConfig` say in every framework is tested there.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"denominater": "token-mean"}, "denominater: unknown option 'denominater'; did you mean 'denominator'?"),
    ({"policy": "ppo", "policy_params": {"clip_low_threshold": 1}}, "clip_low to 1 - clip_low_threshold"),
    ({"advantage": "rloo"}, "advantage: it is 'rloo', and a Tinker program computes the advantages itself"),
    ({"hint_weight": 0.1, "hint_teacher": "ema"}, "hint_teacher: it is 'ema', and a Tinker program"),
    ({"replay_weight": 1.0, "replay_loss": "kto"}, "needs scores, ref_scores, desirable, reference_kl"),
    ({"replay_weight": 1.0, "replay_temperature": 0.7}, "replay_temperature: it is 0.7, and Tinker's"),
    ({"policy": "opd", "kl_penalty_coef": 1}, "kl_penalty_coef: it is a parameter of policy 'opd'; set "),
    ({"policy": "dr_grpo"}, "max_length: the loss is divided by a constant length"),
    ({"policy": "grpo", "max_length": 8.0}, "max_length: it has no effect, because the denominator is"),
    ({"denominator": "token-median"}, "denominator: it is 'token-median'; set denominator to one of"),
    ({"denominator": "prompt-mean"}, "denominator: it is 'prompt-mean', which needs the prompt of"),
    ({"denominator": ""}, "denominator: it is ''; set denominator to one of"),
    ({"policy_weight": 0, "hint_weight": 1, "denominator": ""}, "denominator: it has no effect, because pol"),
    ({"calls_per_step": 0}, "calls_per_step: it is 0"),
    ({"entries": {"advantage": "A"}}, "entries.advantage: unknown input 'advantage'; did you mean"),
    ({"entries": {"mask": "logprobs"}}, "'logprobs' would be read as rollout_logprobs and as mask"),
    ({"entries": {"mask": "target_tokens"}}, "'target_tokens' would be read as the targets and"),
    ({"policy": "reinforce", "old_policy": "rollout"}, "old_policy: policy 'reinforce' takes no old_log"),
    ({"policy": "ppo", "old_policy": "rollout", "rollout_correction": "tis"}, "it would count twice"),
    ({"policy": f"{__name__}:no_loss"}, "has no denominator of its own; set denominator to one of"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda x: str(x)[:40])
def test_an_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ComposerError) as error:
        loss_fn(**options)
    assert message in str(error.value)


def test_two_inputs_may_swap_their_entries() -> None:
    swapped = {"ref_logprobs": "teacher_logprobs", "teacher_logprobs": "ref_logprobs"}
    assert loss_fn(entries=swapped).keys["ref_logprobs"] == "teacher_logprobs"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"policy": "cispoo", "hint_weight": -1.0, "advantage": "rloo"}, "policy hint_weight advantage"),
        ({"policy": "dr_grpoo", "max_length": 8.0}, "policy"),
        ({"learning_rate": 1.0, "policy_weight": -1.0}, "learning_rate policy_weight"),
    ],
    ids=str,
)
def test_all_wrong_options_are_named_at_once_and_what_follows_is_not(options: Any, keys: str) -> None:
    with pytest.raises(ComposerError) as error:
        loss_fn(**options)
    assert {one.partition(":")[0] for one in str(error.value).splitlines()} == {*keys.split()}


def test_an_unknown_option_lists_those_that_are_here() -> None:
    with pytest.raises(
        ComposerError, match="known: calls_per_step, denominator, entries, health, hint_div"
    ) as error:
        loss_fn(group_size=8)
    assert "hint_teacher" not in str(error.value)


def test_data_of_a_traced_loss_are_checked() -> None:
    data, _ = batch()
    with pytest.warns(ComposerWarning, match="mask: it is 0 at every target of the data that are in no pair"):
        custom_loss("cispo").data([changed(data[0], mask=torch.zeros(5))])


def test_an_unlikely_parameter_is_a_warning() -> None:
    with pytest.warns(ComposerWarning, match="policy_params.clip_high"):
        loss_fn(policy="cispo", policy_params={"clip_high": -0.5})


def at(row: int, name: str) -> str:
    return f"data[{row}].loss_fn_inputs['{name}']: "


Change = Callable[[list[Any], list[Tensor]], Any]


def replaced(row: int, **entries: Tensor) -> Change:
    return lambda data, logprobs: setitem(data, row, changed(data[row], **entries))


def removed(name: str, *rows: int) -> Change:
    def change(data: list[Any], logprobs: list[Tensor]) -> None:
        for row in rows or range(len(data)):
            data[row] = without(data[row], name)

    return change


def answered(row: int, logprob: Tensor) -> Change:
    return lambda data, logprobs: setitem(logprobs, row, logprob)


def in_pairs(**entries: Tensor) -> Change:
    """The first two data are a pair, and the first has these entries."""

    def change(data: list[Any], logprobs: list[Tensor]) -> None:
        data[:2] = mark_pairs(data[:1], data[1:2])
        data[0] = changed(data[0], **entries)

    return change


def cut_in_a_pair(data: list[Any], logprobs: list[Tensor]) -> None:
    """The log-probability of a token is missing, and SimPO reads no other input."""
    data[:] = mark_pairs(data[:2], data[2:])
    logprobs[1] = logprobs[1][:2]


HINT = {"policy": "reinforce", "hint_weight": 0.1}
PAIRS = {"policy": "reinforce", "replay_weight": 1.0}
WEIGHT, ONE = "write a finite number of at least 0", torch.tensor([1])
DATA: list[tuple[dict[str, Any], Change, str]] = [
    ({}, removed("mask", 1), at(1, "mask") + "it is absent, and the datum has target_tokens, advantages"),
    ({}, removed("advantages", 2), at(2, "advantages") + "it is absent"),
    ({}, removed("logprobs"), ""),  # old_logprobs are there: PPO's clip needs no other
    ({"policy": "dppo_tv"}, removed("logprobs", 0), at(0, "logprobs") + "it is absent"),
    ({}, removed("old_logprobs", 3), at(3, "old_logprobs") + "it is absent, and the datum has target_tokens"),
    (HINT, removed("teacher_logprobs", 3), "call add_teacher_logprobs"),
    ({}, replaced(1, mask=torch.tensor([0.0, 0.5, 1])), at(1, "mask") + "it holds 0.5, and a mask holds 0"),
    ({}, replaced(1, mask=torch.ones(4)), at(1, "mask") + "its shape is [4], and target_tokens has [3]"),
    ({}, replaced(1, advantages=torch.ones(1)), at(1, "advantages") + "its shape is [1], and the datum has"),
    ({}, replaced(0, advantages=torch.full((5,), torch.nan)), at(0, "advantages") + "it holds nan at an unm"),
    ({}, replaced(1, old_logprobs=torch.ones(3)), at(1, "old_logprobs") + "it holds 1 at an unmasked token"),
    ({}, answered(1, torch.full((3,), 0.125)), ""),
    ({}, answered(1, torch.full((3,), 0.13)), "logprobs[1]: it holds 0.13 at an unmasked token, and a log-p"),
    ({}, answered(1, torch.zeros(4).double()), "logprobs[1]: it has 4 numbers, and the datum 3 targets"),
    (PAIRS | {"policy_weight": 0, "replay_loss": "simpo"}, cut_in_a_pair, "logprobs[1]: it has 2 numbers"),
    ({}, lambda data, logprobs: logprobs.reverse(), "logprobs[0]: it has 4 numbers, and the datum 5 targets"),
    ({}, lambda data, logprobs: data.pop(), "logprobs: there are 4, and 3 data"),
    ({}, answered(1, torch.full((3,), torch.nan)), "logprobs[1]: it holds nan at an unmasked token"),
    ({"policy": "gspo"}, replaced(2, advantages=torch.arange(7.0)), "advantages: they differ within a seq"),
    ({"calls_per_step": 2}, removed("none"), "calls_per_step: it is 2, and this call has no counts"),
    ({"rollout_correction": "tis"}, removed("old_logprobs"), "rollout_correction: old_logprobs are the samp"),
    ({"replay_weight": 1.0}, removed("none"), "pair: replay_weight is 1, and no datum of the step has it"),
    ({}, replaced(0, pair=ONE), at(0, "pair") + "the datum is in a pair, and replay_weight is 0"),
    (PAIRS, replaced(0, pair=ONE), at(0, "pair") + "pair 1 has a chosen completion alone"),
    (PAIRS, in_pairs(pair_weight=torch.tensor([torch.inf])), f"{at(0, 'pair_weight')}it is inf; {WEIGHT}"),
    (PAIRS, in_pairs(pair=torch.tensor([1.7])), at(0, "pair") + "it is 1.7; write one whole number"),
    (PAIRS, in_pairs(mask=torch.zeros(5)), at(0, "mask") + "it is 0 at every target, and the datum is in a"),
    (PAIRS, in_pairs(ref_logprobs=torch.ones(5)), at(0, "ref_logprobs") + "it holds 1 at an unmasked token"),
    (
        {},
        replaced(1, target_tokens=torch.ones(3, 2).long(), mask=torch.ones(3, 2)),
        at(1, "target_tokens") + "its shape is [3, 2]; use one target per position",
    ),
]


@pytest.mark.parametrize(("options", "change", "message"), DATA, ids=lambda x: str(x)[:50])
def test_wrong_data_are_one_clear_error(options: dict[str, Any], change: Change, message: str) -> None:
    data, logprobs = batch()
    function = loss_fn(**options)
    change(data, logprobs)
    if not message:
        loss_and_gradients(function, data, logprobs)
        return
    with pytest.raises(ComposerError) as error:
        loss_and_gradients(function, data, logprobs)
    assert message in str(error.value)
    if not str(error.value).startswith(("logprobs", "calls_per_step")):  # what the data alone show
        with pytest.raises(ComposerError) as counted:
            function.count(data)
        assert str(counted.value) == str(error.value)


def test_a_step_has_no_more_calls_than_it_was_made_for() -> None:
    data, logprobs = batch()
    function = loss_fn(policy="cispo", calls_per_step=2)
    step = function.of_step(function.count(data))
    loss_and_gradients(step, data[:2], logprobs[:2])
    with pytest.raises(ComposerError, match="have 14 tokens, and it was made for 12"):
        loss_and_gradients(step, data[1:], logprobs[1:])


def test_a_step_without_a_hint_is_a_warning_once() -> None:
    data, logprobs = batch()
    function = loss_fn(**HINT)
    none = [changed(one, hint_mask=torch.zeros(len(x))) for one, x in zip(data, logprobs, strict=True)]
    with pytest.warns(ComposerWarning, match="hint_weight: it is 0.1, and no token has a hint") as warned:
        function.count(none)
        loss_and_gradients(function, none, logprobs)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_a_sum_needs_no_counts() -> None:
    data, logprobs = batch()
    one, several = (loss_fn(policy="ppo@tinker", calls_per_step=n) for n in (1, 2))
    assert torch.equal(*(loss_and_gradients(f, data, logprobs)[0] for f in (one, several)))


def test_pairs_alone_without_a_policys_data_are_a_warning() -> None:
    data, _ = batch()
    pairs = mark_pairs(data[:2], data[2:])
    with pytest.warns(ComposerWarning, match="so the policy term is 0; .* or set policy_weight to 0"):
        loss_fn(replay_weight=1.0).count(pairs)


def test_both_completions_of_a_pair_have_numbers_of_their_own() -> None:
    data, logprobs = batch()
    twice = [*mark_pairs(data[:1], data[1:2]), *mark_pairs(data[2:3], data[3:])]
    with pytest.raises(ComposerError, match="two data have the number 1; call mark_pairs once"):
        loss_and_gradients(loss_fn(replay_weight=1.0), twice, logprobs)


def no_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A loss of a user's, with a wrong result."""
    return (logprobs * advantages).sum()


def test_a_wrong_result_of_a_users_loss_is_refused_before_a_call() -> None:
    with pytest.raises(ComposerError, match="returned Tensor"):
        loss_fn(policy=f"{__name__}:no_loss", denominator="token-mean").count(batch()[0])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:mask:composer_plugins.errors.ComposerWarning")  # one law has no token
def test_check_finds_one_law_that_an_error_breaks() -> None:
    """`check --as tinker`: NaN at an unmasked token is an error here, and not a loss of NaN."""
    report = check_as(loss_fn(policy="cispo", denominator="token-sum"), "tinker")
    failed = [one for one in report.outcomes if one.status not in ("passed", "not applicable")]
    assert [one.check for one in failed] == ["nan_is_seen_in_its_row_and_in_no_other"]
    assert "DataError: logprobs[0]: it holds nan at an unmasked token" in failed[0].detail
