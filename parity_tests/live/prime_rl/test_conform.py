"""The claims of `conform prime-rl` hold for every generation, with formulas in the place of a checkout.

`adapters/prime_rl_plugin/test_live.py` makes the same comparison with a checkout, where one is given.
"""

import pytest
import torch

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.prime_rl_claims.claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case
from parity_tests.rigs.prime_rl_formulas import DOUBLES, FORMULAS
from parity_tests.rigs.prime_rl_words import INPUTS, loss_inputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:prime-rl. it is newer than the newest", "ignore:.*multiplies the advantages with the hint"
)
EVERY = {(since, claim.theirs): claim for since, double in DOUBLES.items() for claim in claims(double)}
RECORDED = {"v0.4.0": "0.4", "v0.5.0": "0.5", "v0.6.0": "0.6", "v0.8.0": "0.8.1.dev52"}
TESTS = [
    (version, since, case)
    for version, since in RECORDED.items()
    for case in golden.load(f"prime_rl/{version}")
    if case.get("fn") in ("default_loss_fn", "ipo_loss_fn") and "raises" not in case
    if case["hp"].get("ratio_type") != "sequence" and INPUTS[case["case"]]["noise_kind"] != "overflow"
]
RECORDS = [pytest.param(*one, id=f"{one[1]}-{golden.case_id(one[2])}") for one in TESTS]
# As `golden.claim` has it where --golden-dir names a directory without these files.
RECORDS = RECORDS or [
    pytest.param("", "", {}, marks=pytest.mark.skip("the golden directory has no such case"))
]


@pytest.mark.thorough
@pytest.mark.parametrize("claim", EVERY.values(), ids=[f"{kind} of {since}" for since, kind in EVERY])
def test_its_losses_equal_ours_with_the_kwargs_of_the_table(claim: Claim) -> None:
    row = compared(claim, CASES)
    assert row.status == "equal", row.note


def test_every_loss_of_the_table_is_compared() -> None:
    found = {(since, one.options["type"]) for one in PRIME_RL.losses for since in PRIME_RL.releases_of(one)}
    assert found == EVERY.keys() == {(since, kind) for since, kinds in FORMULAS.items() for kind in kinds}


@pytest.mark.golden
@pytest.mark.parametrize(("version", "since", "case"), RECORDS)
def test_the_formulas_equal_the_recorded_numbers(version: str, since: str, case: Case) -> None:
    given = loss_inputs(version, "default", {}, INPUTS[case["case"]])
    kind = case["fn"].removesuffix("_loss_fn")
    options = {name: value for name, value in case["hp"].items() if name != "ratio_type"}  # "token" here
    loss = DOUBLES[since].loss_fn(type=kind, **options)(given).loss
    (gradient,) = torch.autograd.grad(loss, given.trainer_logprobs)
    scale = {"terms": len(gradient), "dtype": gradient.dtype}
    largest = float(gradient.abs().max()) * len(gradient) + 1
    assert_parity(loss, golden.tensor(case["loss"]), **scale, magnitude=largest, what="loss")
    assert_parity(gradient, golden.tensor(case["grad"]), **scale, what="gradient")


@pytest.mark.skipif(golden.directory != golden.GOLDEN, reason="of our own golden directory")
def test_most_records_are_compared() -> None:
    assert len(TESTS) > 150
