"""The parity table of verl: each row within its dtype's tolerance, and nothing left out in silence."""

import re

import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from parity_tests.live.verl.test_advantages import NOT_COMPARED as NO_KERNEL
from parity_tests.live.verl.test_policy import NOT_COMPARED as NO_LOSS
from parity_tests.support import verl_table
from parity_tests.support.verl_claims import LEFT_OUT, Claim, policies
from parity_tests.support.verl_drawn import drawn
from parity_tests.support.verl_estimates import advantages
from parity_tests.support.verl_facts import assert_complete, with_dialect

CLAIMS = policies() + advantages()
FEW = 40
# verl's names of what LEFT_OUT names by ours.
THEIRS = {f"{name}@verl": name for name in ("clip_cov", "kl_cov", "gdpo", "gae", "remax")}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.ours}-{claim.theirs}")
def test_a_row_is_within_the_tolerance_of_its_dtype_and_terms(claim: Claim) -> None:
    cases = drawn(claim.cases, FEW)
    assert len(cases) >= FEW
    for case in cases:
        for error in claim.errors(case):
            assert error.found <= error.allowed, case


def test_every_dialect_of_verl_is_in_the_table_or_left_out_with_a_reason() -> None:
    rows = {f"{loss.name}@verl" for kind in ("policy", "advantage") for loss in with_dialect(kind)}
    compared = {claim.ours for claim in CLAIMS if claim.ours.endswith("@verl")}
    assert not compared & set(LEFT_OUT)
    assert compared | set(LEFT_OUT) == rows


def test_every_name_in_verls_registries_is_in_the_table_or_left_out_with_a_reason() -> None:
    for registry, claims, reasons in (
        (POLICY_LOSS_REGISTRY, policies(), NO_LOSS),
        (ADV_ESTIMATOR_REGISTRY, advantages(), NO_KERNEL),
    ):
        left_out = {name: LEFT_OUT[ours] for ours, name in THEIRS.items() if name in registry}
        assert_complete(registry, {claim.theirs for claim in claims}, left_out | reasons)


def test_what_is_left_out_is_in_no_registry_of_verls_under_our_name() -> None:
    assert set(THEIRS) == set(LEFT_OUT)
    ours = {f"composer/{name.partition('@')[0]}" for name in LEFT_OUT}
    assert not ours & {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}


def test_the_command_prints_a_row_of_numbers_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    verl_table.main(count=2)
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\S+) \| (\w+) \| \d+( \| (?:0|\d\.\de-\d\d))+ \|", printed, re.MULTILINE)
    assert [(ours, theirs) for ours, theirs, _ in rows] == [(claim.ours, claim.theirs) for claim in CLAIMS]
    assert all(f"- {name}: {reason}" in printed for name, reason in LEFT_OUT.items())
