"""PRIME-RL itself, from a checkout: its losses equal ours with its own `type = "custom"`."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from composer_plugins.conformance.prime_rl_claims import claims
from composer_plugins.conformance.prime_rl_claims.claims import OURS, drawn
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from docs.generator.written import part
from parity_tests.rigs.claims import check
from parity_tests.rigs.prime_rl_checkout import with_checkout

pytestmark = with_checkout


def test_its_losses_equal_ours_through_its_compute_loss(upstream: Upstream) -> None:
    found = claims.claims(upstream)
    assert found

    @settings(max_examples=60)
    @given(data=st.data())
    def prove(data: st.DataObject) -> None:
        for claim in found:
            check(claim, data)

    prove()


def test_an_error_of_ours_comes_through_at_the_first_call(upstream: Upstream) -> None:
    table = {"type": "custom", "import_path": OURS, "kwargs": {"polcy": "dppo_tv"}}
    with pytest.raises(ValueError, match="unknown option 'polcy'; did you mean 'policy'"):
        upstream.compute_loss(drawn(1), upstream.loss_fn(**table), 7)


def test_docs_findings_have_what_a_new_run_finds(upstream: Upstream) -> None:
    part("docs/writing_a_loss.md", "prime-rl").check()
