"""Every policy loss of the installed verl against our kernels, on drawn batches: value, gradient, metrics."""

import hypothesis.strategies as st

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.verl_claims.policy import CLAIMS, VANILLA
from parity_tests.rigs.claims import check, proves
from parity_tests.rigs.verl_facts import with_dialect

OF_VANILLA = [claim for claim in CLAIMS if claim.theirs == "vanilla" and claim.note]
BY_THEMSELVES = ("geo_mean", "clip_cov", "kl_cov")
OTHERS = [claim for claim in CLAIMS if claim not in OF_VANILLA and claim.theirs not in BY_THEMSELVES]


@proves(OTHERS, examples=60)
def test_policy_loss_equals_verl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(OF_VANILLA, examples=20)
def test_every_row_that_is_vanilla_in_verl_equals_it_at_the_numbers_of_its_dialect(
    claim: Claim, data: st.DataObject
) -> None:
    check(claim, data)


@proves(CLAIMS, "gmpo@verl", examples=60)
def test_gmpo_equals_verl_geo_mean(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "clip_cov@verl", examples=60)
def test_clip_cov_equals_verl_when_both_draw_the_first_tokens(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "kl_cov@verl", examples=60)
def test_kl_cov_equals_verl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


def test_every_policy_row_with_a_dialect_of_verl_is_compared() -> None:
    rows = {f"{loss.name}@verl" for loss in with_dialect("policy")}
    assert rows == {claim.ours for claim in CLAIMS} - {"dro"}  # whose number has no default here nor there
    assert VANILLA.keys() >= {"grpo", "ppo", "dapo", "dr_grpo"}
