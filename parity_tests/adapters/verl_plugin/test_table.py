"""Our losses in verl's registries equal verl's own, and nothing is left out in silence."""

import hypothesis.strategies as st
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.verl_claims.policy import NOT_COMPARED as NO_LOSS
from composer_plugins.conformance.verl_claims.suite import NO_KERNEL
from composer_plugins.conformance.verl_claims.upstream import of_verl
from composer_plugins.losses.registry import losses
from parity_tests.rigs.claims import check, proves
from parity_tests.rigs.verl_registered import LEFT_OUT, advantages, policies

CLAIMS = policies() + advantages()
# verl's names of what LEFT_OUT names by ours.
THEIRS = {f"{name}@verl": name for name in ("clip_cov", "kl_cov", "gdpo", "gae", "remax")}


@proves(CLAIMS, examples=60)
def test_a_registered_loss_is_verls(claim: Claim, data: st.DataObject) -> None:
    """Value, gradient and verl's own metrics, by verl's options and by ours."""
    check(claim, data)


def test_every_dialect_of_verl_is_in_the_table_or_left_out_with_a_reason() -> None:
    registered = [loss for loss in losses() if loss.kind in ("policy", "advantage")]
    rows = {f"{x.name}@verl" for x in registered if any(one.upstream == "verl" for one in x.dialects)}
    compared = {claim.ours for claim in CLAIMS if claim.ours.endswith("@verl")}
    assert not compared & set(LEFT_OUT)
    assert compared | set(LEFT_OUT) == rows


def test_every_name_in_verls_registries_is_in_the_table_or_left_out_with_a_reason() -> None:
    for registry, claims, reasons in (
        (POLICY_LOSS_REGISTRY, policies(), NO_LOSS),
        (ADV_ESTIMATOR_REGISTRY, advantages(), {name: why for (_, name), why in NO_KERNEL.items()}),
    ):
        left_out = {name: LEFT_OUT[ours] for ours, name in THEIRS.items() if name in registry}
        reasons = {name: why for name, why in reasons.items() if name in registry}
        reasons, compared = {*left_out, *reasons}, {claim.theirs for claim in claims}
        assert not compared & reasons
        assert compared | reasons == of_verl(registry)


def test_what_is_left_out_is_in_no_registry_of_verls_under_our_name() -> None:
    assert set(THEIRS) == set(LEFT_OUT)
    ours = {f"composer/{name.partition('@')[0]}" for name in LEFT_OUT}
    assert not ours & {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}
