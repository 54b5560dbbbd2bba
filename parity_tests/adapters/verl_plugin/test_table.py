"""Our losses in verl's registries equal verl's own, and nothing is left out in silence."""

import hypothesis.strategies as st
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.verl_claims.policy import NOT_COMPARED as NO_LOSS
from composer_plugins.conformance.verl_claims.suite import NO_KERNEL
from composer_plugins.conformance.verl_claims.upstream import of_verl
from parity_tests.rigs.claims import check, proves
from parity_tests.rigs.every import rows
from parity_tests.rigs.verl_registered import LEFT_OUT, advantages, policies

CLAIMS = policies() + advantages()
NOT_OURS = {name.removesuffix("@verl") for name in LEFT_OUT}


@proves(CLAIMS, examples=60)
def test_a_registered_loss_is_verls(claim: Claim, data: st.DataObject) -> None:
    """Value, gradient and verl's own metrics, by verl's options and by ours."""
    check(claim, data)


def test_every_dialect_of_verl_is_in_the_table_or_left_out_with_a_reason() -> None:
    registered = rows("policy", "advantage")
    named = {f"{x.name}@verl" for x in registered if any(one.upstream == "verl" for one in x.dialects)}
    compared = {claim.ours for claim in CLAIMS if claim.ours.endswith("@verl")}
    assert not compared & set(LEFT_OUT)
    assert compared | set(LEFT_OUT) == named


def test_every_name_in_verls_registries_is_in_the_table_or_left_out_with_a_reason() -> None:
    for registry, claims, reasons in (
        (POLICY_LOSS_REGISTRY, policies(), NO_LOSS),
        (ADV_ESTIMATOR_REGISTRY, advantages(), [name for _, name in NO_KERNEL]),
    ):
        reasons = {name for name in {*NOT_OURS, *reasons} if name in registry}
        compared = {claim.theirs for claim in claims}
        assert not compared & reasons
        assert compared | reasons == of_verl(registry)


def test_what_is_left_out_is_in_no_registry_of_verls_under_our_name() -> None:
    ours = {f"composer/{name}" for name in NOT_OURS}
    assert not ours & {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}
