"""Every trainer of the installed TRL, and every loss it lets one choose, is compared or has a reason."""

import pytest

from composer_plugins.conformance.claims import Absent
from composer_plugins.conformance.trl_claims import names
from composer_plugins.conformance.trl_claims.suite import suite
from parity_tests.live.trl import (  # noqa: F401  (each names the claims that it proves)
    test_advantages,
    test_distilled,
    test_divergences,
    test_policy,
    test_preference,
)
from parity_tests.rigs import claims

SUITE = suite()


def test_every_loss_of_trl_is_compared_or_has_a_reason() -> None:
    assert not [row for row in SUITE.absent() if row.reason == names.UNKNOWN]


def test_no_reason_is_about_what_trl_does_not_have_or_a_claim_compares() -> None:
    absent = {(row.theirs, row.reason) for row in SUITE.absent()}
    reasons = [reason for values in names.NOT_COMPARED.values() for reason in values.values()]
    assert len(absent) == len(reasons)
    assert names.found().keys() >= {*names.NOT_COMPARED, *names.NO_LOSS}


def test_every_claim_is_about_what_trl_has_and_a_test_proves_it() -> None:
    assert [claim for claim in SUITE.claims if not SUITE.is_there(claim.place)] == []
    proven = {*map(str, claims.NAMED)}
    assert [str(claim) for claim in SUITE.claims if str(claim) not in proven] == []


@pytest.mark.parametrize(
    ("file", "options", "shown"),
    [
        (names.FILES["GRPOTrainer"], {"loss_type": {"grpo", "new_po"}}, "grpo_trainer loss_type=new_po"),
        ("experimental/new/new_trainer.py", {}, "new_trainer"),
    ],
)
def test_a_new_loss_of_trl_is_not_in_the_catalogue(
    file: str, options: dict[str, set[str]], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = names.found() | {file: options}
    monkeypatch.setattr(names, "found", lambda: found)
    assert Absent(shown, names.UNKNOWN, missing=True) in [*SUITE.absent()]


def test_an_option_that_trl_no_longer_has_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "found", lambda: {names.FILES["GRPOTrainer"]: {"loss_type": {"grpo"}}})
    there = {claim.theirs for claim in SUITE.claims if SUITE.is_there(claim.place)}
    assert not there  # none without an importance_sampling_level
    monkeypatch.setattr(
        names,
        "found",
        lambda: {names.FILES["GRPOTrainer"]: {"loss_type": {"grpo"}, "importance_sampling_level": {"token"}}},
    )
    there = {claim.theirs for claim in SUITE.claims if SUITE.is_there(claim.place)}
    assert there == {"GRPOTrainer grpo"}


def test_sdft_uses_a_file_equal_to_sdpos() -> None:
    sdpo, sdft = (names.root() / "experimental" / name / "loss_utils.py" for name in ("sdpo", "sdft"))
    assert sdpo.read_text() == sdft.read_text()
