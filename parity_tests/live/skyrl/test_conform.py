"""The claims of `composer-plugins conform skyrl` hold for the installed SkyRL, and no loss is left out."""

from typing import Any

import hypothesis.strategies as st
import pytest

from composer_plugins.adapters.skyrl_loss.upstream import release_of
from composer_plugins.conformance.claims import GRADIENT, VALUE, Claim
from composer_plugins.conformance.skyrl_claims import suite as claims_of_skyrl
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.conformance.skyrl_claims.suite import NO_KERNEL, UNKNOWN, suite
from parity_tests.rigs import claims
from parity_tests.rigs.claims import proves
from parity_tests.rigs.every import rows

SUITE = suite()
HERE = [claim for claim in SUITE.claims if SUITE.is_there(claim.place)]
REGISTRY = upstream.ppo_utils.PolicyLossRegistry


@proves(HERE, examples=60)
def test_the_loss_equals_skyrl(claim: Claim, data: st.DataObject) -> None:
    """Value and gradient of each dialect "@skyrl" equal those of its function, by the table and registry."""
    claims.check(claim, data)


@pytest.mark.parametrize("claim", HERE, ids=str)
def test_a_difference_of_a_thousandth_would_be_noticed(claim: Claim) -> None:
    assert claims.could_fail(claim, VALUE)
    assert claim.kind in ("advantage", "correction") or claims.could_fail(claim, GRADIENT)


def test_a_change_in_skyrl_is_a_row_that_differs_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    own = REGISTRY.get("sapo")

    def changed(*given: Any, **more: Any) -> Any:
        loss, metrics = own(*given, **more)
        return loss * (1 + 1e-4), metrics

    monkeypatch.setitem(REGISTRY._functions, "sapo", changed)
    assert claims.conform("skyrl", "sapo", "gspo_token") == (1, {"sapo": "differs", "gspo": "equal"})


def test_every_loss_of_skyrl_is_compared_or_has_a_reason() -> None:
    absent = [*SUITE.absent()]
    assert [row for row in absent if row.reason == UNKNOWN] == []
    assert {row.theirs for row in absent} == {name for _, name in NO_KERNEL}


def test_every_row_with_a_dialect_of_skyrl_is_compared() -> None:
    dialects = {
        (row.kind, f"{row.name}@{d.upstream}")
        for row in rows()
        for d in row.dialects
        if d.framework == "skyrl"
    }
    assert dialects == {(claim.kind, claim.ours) for claim in SUITE.claims}


def test_a_loss_of_another_release_is_not_in_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [claim.ours for claim in SUITE.claims if not SUITE.is_there(claim.place)]
    of_03, of_04 = ["cispo@skyrl<0.4"], ["cispo@skyrl", "cispo@skyrl"]
    assert gone == (of_04 if release_of(None) == "0.3" else of_03)
    monkeypatch.setattr(upstream, "registered", lambda: {"policy losses": {"new_po"}})
    changed = claims_of_skyrl.suite()
    assert [(row.theirs, row.missing) for row in changed.absent()] == [("new_po", True)]
