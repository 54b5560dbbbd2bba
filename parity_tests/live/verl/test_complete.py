"""Every loss that the installed verl has registered is compared, or the catalogue lacks it for a reason."""

import pytest

from composer_plugins.conformance.claims import Absent
from composer_plugins.conformance.verl_claims import suite as claims_of_verl
from composer_plugins.conformance.verl_claims import upstream_rest
from composer_plugins.conformance.verl_claims.suite import NO_KERNEL, UNKNOWN, suite
from parity_tests.live.verl import test_advantages, test_distillation, test_policy, test_reduction  # noqa: F401  (each names the claims that it proves)
from parity_tests.rigs import claims

SUITE = suite()


def test_every_loss_of_verl_is_compared_or_has_a_reason() -> None:
    absent = [*SUITE.absent()]
    assert [row for row in absent if row.reason == UNKNOWN] == []
    assert {row.theirs for row in absent} == {name for _, name in NO_KERNEL}


def test_every_claim_is_about_what_verl_has_and_a_test_proves_it() -> None:
    assert [claim for claim in SUITE.claims if not SUITE.is_there(claim.place)] == []
    proven = {*map(str, claims.NAMED)}
    assert [str(claim) for claim in SUITE.claims if str(claim) not in proven] == []


def test_a_new_loss_of_verl_is_not_in_the_catalogue_and_one_that_is_gone_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = upstream_rest.registered()
    policies = registered["policy losses"] - {"cispo"} | {"new_po"}
    monkeypatch.setattr(upstream_rest, "registered", lambda: registered | {"policy losses": policies})
    changed = claims_of_verl.suite()
    assert Absent("new_po", UNKNOWN, missing=True) in [*changed.absent()]
    assert {c.ours for c in changed.claims if not changed.is_there(c.place)} == {"cispo@verl"}
