"""The claims of `composer-plugins conform trl` hold for the installed TRL, and leave out no loss of it."""

from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
from trl import GRPOTrainer

from composer_plugins.conformance.claims import GRADIENT, VALUE, Absent, Claim
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.conformance.trl_claims import names, upstream, upstream_pairs, upstream_rollouts
from composer_plugins.conformance.trl_claims.suite import suite
from docs.generator.written import part
from parity_tests.rigs import claims
from parity_tests.rigs.claims import proves
from parity_tests.rigs.every import rows

SUITE = suite()


@proves(SUITE.claims, examples=80)
def test_the_loss_equals_trl(claim: Claim, data: st.DataObject) -> None:
    """Value and gradient of each dialect "@trl" equal its trainer's, on drawn tensors."""
    claims.check(claim, data)


@pytest.mark.parametrize("claim", SUITE.claims, ids=str)
def test_a_difference_of_a_thousandth_would_be_noticed(claim: Claim) -> None:
    has_value, has_gradient = claim.ours != "rloo", claim.kind not in ("advantage", "correction")
    assert not has_value or claims.could_fail(claim, VALUE)
    assert not has_gradient or claims.could_fail(claim, GRADIENT)


@pytest.mark.parametrize(
    "theirs", ["GRPOTrainer sapo", "GRPOTrainer scale_rewards=group", "DPOTrainer exo_pair"]
)
def test_trl_makes_numbers_in_float32_and_we_do_not(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temperature, n / (n - 1) and a logarithm: the claims let TRL make them in float64."""
    for module in (upstream, upstream_pairs, upstream_rollouts):
        monkeypatch.setattr(module, "in_float64", nullcontext)
    (claim,) = [one for one in SUITE.claims if one.theirs == theirs]
    row = compared(claim, CASES)
    assert row.status == "differs" and all(error.found < 1e-5 for error in row.errors.values())


def test_every_row_with_a_dialect_of_trl_is_compared() -> None:
    """The aggregation modes and the KL are terms of GRPOTrainer's losses."""
    dialects = {
        (row.kind, f"{row.name}@trl") for row in rows() if any(d.upstream == "trl" for d in row.dialects)
    }
    compared = {(claim.kind, claim.ours) for claim in SUITE.claims}
    assert {kind for kind, _ in dialects - compared} == {"aggregation", "kl"}


def test_a_change_in_trl_is_a_row_that_differs_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GRPOTrainer.get_gamma_weights
    monkeypatch.setattr(
        GRPOTrainer, "get_gamma_weights", staticmethod(lambda *a, **k: own(*a, **k) * (1 + 1e-9))
    )
    vespo = dict.fromkeys(("GRPOTrainer vespo", "GRPOTrainer vespo, sequence"), "differs")
    assert claims.conform("trl", "vespo", "cispo@trl") == (1, vespo | {"GRPOTrainer cispo": "equal"})


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints() -> None:
    part("docs/parity.md", "trl").check()


def test_every_claim_is_about_what_trl_has_and_every_other_loss_has_a_reason() -> None:
    assert [claim for claim in SUITE.claims if not SUITE.is_there(claim.place)] == []
    assert not [row for row in SUITE.absent() if row.reason == names.UNKNOWN]


def test_no_reason_is_about_what_trl_does_not_have_or_a_claim_compares() -> None:
    absent = {(row.theirs, row.reason) for row in SUITE.absent()}
    reasons = [reason for values in names.NOT_COMPARED.values() for reason in values.values()]
    assert len(absent) == len(reasons)
    assert names.found().keys() >= {*names.NOT_COMPARED, *names.NO_LOSS}


@pytest.mark.parametrize(
    ("file", "options", "shown"),
    [
        (names.FILES["GRPOTrainer"], {"loss_type": {"grpo", "new_po"}}, "grpo_trainer loss_type=new_po"),
        ("experimental/new/new_trainer.py", {}, "new_trainer"),
    ],
)
def test_a_new_loss_of_trl_is_not_in_the_catalogue(
    file: str, options: dict[str, set[str]], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = names.found() | {file: options}
    monkeypatch.setattr(names, "found", lambda: found)
    assert Absent(shown, names.UNKNOWN, missing=True) in [*SUITE.absent()]


def test_an_option_that_trl_no_longer_has_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = {"loss_type": {"grpo"}}
    for options, there in (
        (grpo, set()),  # none without an importance_sampling_level
        (grpo | {"importance_sampling_level": {"token"}}, {"GRPOTrainer grpo"}),
    ):
        monkeypatch.setattr(names, "found", lambda options=options: {names.FILES["GRPOTrainer"]: options})
        assert {claim.theirs for claim in SUITE.claims if SUITE.is_there(claim.place)} == there


def test_sdft_uses_a_file_equal_to_sdpos() -> None:
    sdpo, sdft = (names.root() / "experimental" / name / "loss_utils.py" for name in ("sdpo", "sdft"))
    assert sdpo.read_text() == sdft.read_text()
