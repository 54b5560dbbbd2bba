"""verl's distillation losses against ours, through the functions that its engine calls, on drawn logits."""

import hypothesis.strategies as st

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.verl_claims.distillation import CLAIMS
from parity_tests.rigs.claims import check, proves
from parity_tests.rigs.verl_facts import with_dialect

ESTIMATORS = [claim for claim in CLAIMS if claim.kind == "kl"]


@proves(CLAIMS, "forward_kl_topk@verl", examples=50)
def test_forward_kl_topk_equals_verl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(ESTIMATORS, examples=50)
def test_estimator_equals_verl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


def test_every_divergence_with_a_dialect_of_verl_is_compared() -> None:
    """sampled_token@verl is compared with the estimator k3, verl's default."""
    compared = {claim.ours for claim in CLAIMS if claim.kind == "divergence"} | {"sampled_token@verl"}
    assert {f"{loss.name}@verl" for loss in with_dialect("divergence")} == compared
