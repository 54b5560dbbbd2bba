"""Advantages, and the weights of a rollout by another engine, against live GRPO and RLOO trainers."""

import hypothesis.strategies as st

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.trl_claims.advantages import CLAIMS
from parity_tests.rigs.claims import check, proves


@proves(CLAIMS, "grpo@trl", "dr_grpo@trl")
def test_advantages_equal_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "gdpo@trl")
def test_gdpo_equals_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "rloo@trl", examples=80)
def test_rloo_equals_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "tis@trl", "mis@trl", examples=80)
def test_rollout_weights_equal_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)
