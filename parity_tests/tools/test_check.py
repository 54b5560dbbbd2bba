"""`check_loss` and `composer-plugins check`: what they find in losses that have one fault each."""

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing import check_loss, parametrize_with_checks
from composer_plugins.testing.laws import FUNCTION, LAWS, NOT_RUN, laws_for
from composer_plugins.testing.laws.traced import TRACED
from parity_tests.cases import faults
from parity_tests.cases.faults import FAULTS, WITH, Fault
from parity_tests.rigs.commands import error, invoke, output

TRACED_NAMES = [law.__name__ for law in TRACED]
# Here jaxtyping checks annotations, which torch cannot trace; test_laws.py runs those in another process.
UNTRACED = [name for name in LAWS if name not in TRACED_NAMES]
HERE = "parity_tests.cases.faults"


def failed(loss: Callable[..., Any], kind: str, only: list[str]) -> list[str]:
    """The laws that a loss breaks."""
    return [one.check for one in check_loss(loss, kind=kind, only=only).findings]


def test_every_law_has_a_fault() -> None:
    assert set(LAWS) == {fault.law for fault in FAULTS}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.law}-{fault.name}" for fault in FAULTS])
def test_a_fault_is_found_and_named(fault: Fault) -> None:
    only = TRACED_NAMES if fault.law in TRACED_NAMES else UNTRACED
    assert fault.law in failed(fault.loss, fault.kind, only)


@pytest.mark.parametrize("loss", [faults.sound, faults.raft, faults.nsr, faults.awr])
def test_a_sound_loss_breaks_no_law_and_without_its_minus_one(loss: faults.Loss) -> None:
    assert failed(loss, "policy", UNTRACED) == []

    @wraps(loss)
    def ascending(*inputs: Any) -> TokenLoss:
        return TokenLoss(-loss(*inputs).loss, {})

    assert failed(ascending, "policy", UNTRACED) == ["descent_raises_the_tokens_with_positive_advantages"]


PUBLISHED = [
    (faults.high_entropy, "policy", ["descent_raises_the_tokens_with_positive_advantages"]),
    (faults.rrhf, "preference", ["descent_raises_the_chosen_over_the_rejected"]),
    (faults.skew_kl, "kl", ["expectation_over_the_policy_is_not_negative"]),
    (faults.sequence_kl, "kl", ["expectation_over_the_policy_is_not_negative"]),
    (faults.brier, "divergence", ["descent_moves_the_student_to_the_teacher"]),
]


@pytest.mark.parametrize(("loss", "kind", "law"), PUBLISHED, ids=[one[0].__name__ for one in PUBLISHED])
def test_a_published_loss_of_an_unusual_form_keeps_the_law(
    loss: faults.Loss, kind: str, law: list[str]
) -> None:
    report = check_loss(loss, kind=kind, only=law)
    assert report.passed and report.having("passed"), str(report)


def test_a_report_has_the_numbers_the_place_and_the_usual_cause() -> None:
    (outcome,) = check_loss(
        WITH["multiplies_with_the_mask"], only=["masked_tokens_have_no_influence"]
    ).outcomes
    assert outcome.status == "unsafe" and "product with the mask" in outcome.cause
    assert "with other numbers at masked tokens of 'logprobs', the loss at row 0, token" in outcome.detail


def test_a_mask_of_floats_is_named() -> None:
    (outcome,) = check_loss(WITH["takes_a_mask_of_floats"], only=["result_has_one_value_per_token"]).outcomes
    assert "takes a mask of floats only; masks are bool" in outcome.detail


def raises_with_a_tensor(logprobs: Any, advantages: Any, mask: Any) -> Any:
    return logprobs.clamp(torch.ones(2), 3)


def test_an_error_of_the_loss_comes_with_its_place() -> None:
    (outcome,) = check_loss(raises_with_a_tensor, only=["result_has_one_value_per_token"]).outcomes
    line = raises_with_a_tensor.__code__.co_firstlineno + 1
    assert outcome.detail.endswith(f"(at {os.path.relpath(__file__)}:{line})")
    assert outcome.cause == "the loss itself raises this error"


def test_a_loss_that_cannot_be_used_fails_whichever_law_is_named() -> None:
    found = invoke("check", f"{__name__}:raises_with_a_tensor", "--only=inputs_are_not_written_to")
    assert found.exit_code == 1 and "failed: result_has_one_value_per_token" in found.output


def test_laws_that_are_not_run_are_one_line() -> None:
    done = invoke("check", f"{__name__}:raises_with_a_tensor")
    found = [line.strip() for line in done.output.splitlines()]
    assert found[-2:] == [
        "not applicable: gradient_is_that_of_the_value and 26 more",
        "not run: mend result_has_one_value_per_token first",
    ]
    done = invoke("check", f"{__name__}:raises_with_a_tensor", "--verbose")
    assert done.output.count("not applicable: ") == 27


def test_an_exception_has_a_reason_and_an_old_one_is_found() -> None:
    law = "more_padding_changes_nothing"

    def checked(loss: Callable[..., Any], exception: str) -> Any:
        excused = faults.declares(loss, exceptions={exception: "its authors divide so"})
        return check_loss(excused, only=[law])

    (outcome,) = checked(WITH["divides_by_the_padded_length"], law).outcomes
    assert outcome.status == "not applicable"
    for exception in (law, f"{law}(beta=0.1)"):
        (outcome,) = checked(faults.sound, exception).outcomes
        assert outcome.status == "failed" and "law holds without it" in outcome.detail
    assert "no law of a policy has that name" in str(checked(faults.sound, "more_paddin"))


def test_a_loss_over_the_batch_declares_it() -> None:
    loss = WITH["divides_by_the_tokens_of_the_micro_batch"]
    only = ["micro_batches_and_ranks_leave_the_gradient_alone"]
    assert not check_loss(loss, only=only).passed
    assert check_loss(faults.declares(loss, over_batch=True), only=only).passed


@parametrize_with_checks(["sapo", f"{HERE}:sound", faults.sound], only=["two_calls_give_the_same_result"])
def test_a_third_party_parametrizes_a_test(loss: Any, check: Any) -> None:
    check(loss)


def test_a_check_of_pytest_fails_and_skips() -> None:
    only = ["masked_tokens_have_no_influence", "declared_gradient_is_the_one_that_it_has"]
    cases = parametrize_with_checks([WITH["multiplies_with_the_mask"]], only=only).args[1]
    checks = {case.id.split("-")[-1]: case.values for case in cases}
    loss, check = checks[only[0]]
    with pytest.raises(AssertionError, match="product with the mask"):
        check(loss)
    loss, check = checks[only[1]]
    with pytest.raises(pytest.skip.Exception, match="declares no special gradient"):
        check(loss)


def test_what_is_not_a_loss_is_an_error() -> None:
    with pytest.raises(ConfigError, match="takes 'x' by position, which is not an input of a policy loss"):
        check_loss(lambda x: x, kind="policy")


ONE = "--only=two_calls_give_the_same_result"


def test_the_exit_status_is_0_if_all_laws_hold_and_1_if_one_is_broken() -> None:
    good, bad = f"{HERE}:sound", f"{HERE}:drops_tokens_at_random"
    assert invoke("check", ONE, good).exit_code == 0
    found = invoke("check", ONE, good, bad)
    assert found.exit_code == 1
    assert "failed: two_calls_give_the_same_result" in found.output and "usual cause: random" in found.output


PUBLISHED_PPO = """
import torch
from dataclasses import dataclass, field
@dataclass
class Clip:
    low: float = field(default=0.2)
def ppo(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.min(ratio * advantages, ratio.clamp(1 - Clip().low, 1.2) * advantages) * mask
def wrong(logprobs, old_logprobs, advantages, mask):
    return -ppo(logprobs, old_logprobs, advantages, mask)
def eager(logprobs, old_logprobs, advantages, mask):
    return ppo(logprobs, old_logprobs, advantages, mask) + 0 * logprobs.detach().sum().item()
"""


@pytest.mark.parametrize(
    ("name", "words", "status", "strict"),
    [
        ("ppo", "unsafe: masked_tokens_have_no_influence", 0, 1),
        ("eager", "untraceable: it_runs_on_tensors_without_numbers", 0, 1),
        ("wrong", "failed: descent_raises_the_tokens_with_positive_advantages", 1, 1),
    ],
)
def test_a_published_loss_that_is_right_with_ordinary_inputs_passes(
    tmp_path: Path, name: str, words: str, status: int, strict: int
) -> None:
    (tmp_path / "published.py").write_text(PUBLISHED_PPO)
    given = ("check", f"{tmp_path}/published.py:{name}", "--as", "torch")
    found = invoke(*given)
    assert (found.exit_code, invoke(*given, "--strict").exit_code) == (status, strict), found.output
    assert words in found.output


def test_a_file_that_fails_or_a_function_that_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "published.py").write_text(PUBLISHED_PPO)
    (tmp_path / "broken.py").write_text("1 / 0")
    assert "did you mean 'ppo'?" in error("check", f"{tmp_path}/published.py:pop")
    assert "broken.py fails: ZeroDivisionError" in error("check", f"{tmp_path}/broken.py:x")
    assert "absent.py does not exist; correct its path" in error("check", f"{tmp_path}/absent.py:x")


def test_an_error_of_several_laws_is_one_finding() -> None:
    def only_doubles(logprobs: Any, advantages: Any, mask: Any) -> TokenLoss:
        if logprobs.dtype != torch.float64:
            raise TypeError("doubles only")
        return faults.sound(logprobs, logprobs.detach(), advantages, mask)

    report = check_loss(only_doubles, only=UNTRACED)
    raised = [one for one in report.findings if "doubles only" in one.detail]
    same = [one for one in report.outcomes if "not run to its end: the error of" in one.detail]
    assert len(raised) == 1 and len(same) >= 3


def test_json_has_every_outcome() -> None:
    found = invoke("check", ONE, "--json", f"{HERE}:sound", f"{HERE}:drops_tokens_at_random")
    good, bad = json.loads(found.output)
    assert good["passed"] and not bad["passed"] and found.exit_code == 1
    assert bad["checks"][0]["status"] == "failed" and bad["checks"][0]["cause"]


def test_laws_are_listed_and_none_is_misspelt() -> None:
    listed = output("check", "--laws")
    names = (*LAWS, *laws_for(FUNCTION), *NOT_RUN)
    assert all(name in listed for name in names)
    assert "every_term_is_divided_as_the_advantages_are --as skyrl --as tinker\n  The same rows" in listed
    data = json.loads(output("check", "--laws", "--json"))
    of_a_loss = [(one["name"], tuple(one["kinds"])) for one in data if not one["option"]]
    assert of_a_loss == [(x.name, x.kinds) for x in LAWS.values()]
    assert all(one["summary"] for one in data)
    with_as = [one for one in data if one["option"] == "--as"]
    run_for_verl = [one["name"] for one in with_as if "verl" in one["frameworks"]]
    assert run_for_verl == [*laws_for(FUNCTION, "verl")]
