"""The claims of `composer-plugins conform verl` hold for the installed verl, and leave out no loss of it."""

import hypothesis.strategies as st
import pytest

from composer_plugins.conformance.claims import GRADIENT, VALUE, Absent, Claim
from composer_plugins.conformance.verl_claims import suite as claims_of_verl
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.policy import VANILLA
from composer_plugins.conformance.verl_claims.suite import NO_KERNEL, UNKNOWN, suite
from composer_plugins.frameworks.verl import KL_ESTIMATORS
from docs.generator.written import part
from parity_tests.rigs import claims
from parity_tests.rigs.claims import proves
from parity_tests.rigs.every import rows

SUITE = suite()


@proves(SUITE.claims, examples=60)
def test_the_loss_equals_verl(claim: Claim, data: st.DataObject) -> None:
    """Value, gradient and metrics of each dialect "@verl" equal those of its function, on drawn tensors."""
    claims.check(claim, data)


@pytest.mark.parametrize("claim", SUITE.claims, ids=str)
def test_a_difference_of_a_thousandth_would_be_noticed(claim: Claim) -> None:
    assert claims.could_fail(claim, VALUE)
    assert claim.kind in ("advantage", "correction") or claims.could_fail(claim, GRADIENT)


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints() -> None:
    part("docs/parity.md", "verl").check()


def test_every_loss_of_verl_is_compared_or_has_a_reason() -> None:
    absent = [*SUITE.absent()]
    assert [row for row in absent if row.reason == UNKNOWN] == []
    assert {row.theirs for row in absent} == {name for _, name in NO_KERNEL}
    assert [claim for claim in SUITE.claims if not SUITE.is_there(claim.place)] == []


def test_every_row_with_a_dialect_of_verl_is_compared() -> None:
    """sampled_token@verl is compared as the estimator k3, which is verl's default."""
    dialects = {
        (row.kind, f"{row.name}@verl") for row in rows() if any(d.upstream == "verl" for d in row.dialects)
    }
    compared = {(claim.kind, claim.ours) for claim in SUITE.claims if claim.ours.endswith("@verl")}
    assert dialects == compared | {("divergence", "sampled_token@verl")}
    assert {name for kind, name in dialects if kind == "kl"} == set(KL_ESTIMATORS.values())
    assert VANILLA.keys() >= {"grpo", "ppo", "dapo", "dr_grpo"}


def test_a_new_loss_of_verl_is_not_in_the_catalogue_and_one_that_is_gone_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = upstream.registered()
    policies = registered["policy losses"] - {"cispo"} | {"new_po"}
    monkeypatch.setattr(upstream, "registered", lambda: registered | {"policy losses": policies})
    changed = claims_of_verl.suite()
    assert Absent("new_po", UNKNOWN, missing=True) in [*changed.absent()]
    assert {c.ours for c in changed.claims if not changed.is_there(c.place)} == {"cispo@verl"}
