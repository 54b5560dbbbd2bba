"""The claims of `conform prime-rl` hold for every generation, with formulas in the place of a checkout.

`adapters/prime_rl_plugin/test_live.py` makes the same comparison with a checkout, where one is given.
"""

from types import SimpleNamespace

import pytest
import torch

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.prime_rl_claims.claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.testing.assertions import assert_parity
from parity_tests.golden.test_prime_rl import INPUTS, dtype_of
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case
from parity_tests.rigs.prime_rl_formulas import DOUBLES, FORMULAS

pytestmark = pytest.mark.filterwarnings(
    "ignore:prime-rl. it is newer than the newest", "ignore:.*multiplies the advantages with the hint"
)
EVERY = {(since, claim.theirs): claim for since, double in DOUBLES.items() for claim in claims(double)}
RECORDED = {"v0.4.0": "0.4", "v0.5.0": "0.5", "v0.6.0": "0.6", "v0.8.0": "0.8.1.dev52"}
TESTS = [
    (since, case)
    for version, since in RECORDED.items()
    for case in golden.load(f"prime_rl/{version}")
    if case.get("fn") in ("default_loss_fn", "ipo_loss_fn") and "raises" not in case
    if case["hp"].get("ratio_type") != "sequence" and INPUTS[case["case"]]["noise_kind"] != "overflow"
]
RECORDS = [pytest.param(*one, id=f"{one[0]}-{golden.case_id(one[1])}") for one in TESTS]
# As `golden.claim` has it where --golden-dir names a directory without these files.
RECORDS = RECORDS or [pytest.param("", {}, marks=pytest.mark.skip("the golden directory has no such case"))]


@pytest.mark.parametrize("claim", EVERY.values(), ids=[f"{kind} of {since}" for since, kind in EVERY])
def test_its_losses_equal_ours_with_the_kwargs_of_the_table(claim: Claim) -> None:
    row = compared(claim, CASES)
    assert row.status == "equal", row.note


def test_every_loss_of_the_table_is_compared() -> None:
    found = {(since, one.options["type"]) for one in PRIME_RL.losses for since in PRIME_RL.releases_of(one)}
    assert found == EVERY.keys() == {(since, kind) for since, kinds in FORMULAS.items() for kind in kinds}


@pytest.mark.golden
@pytest.mark.parametrize(("since", "case"), RECORDS)
def test_the_formulas_equal_the_recorded_numbers(since: str, case: Case) -> None:
    given = loss_inputs(INPUTS[case["case"]], weighs=since == "0.8.1.dev52")
    kind = case["fn"].removesuffix("_loss_fn")
    loss = DOUBLES[since].loss_fn(type=kind, **without_level(case["hp"]))(given).loss
    (gradient,) = torch.autograd.grad(loss, given.trainer_logprobs)
    scale = {"terms": len(gradient), "dtype": gradient.dtype}
    largest = float(gradient.abs().max()) * len(gradient) + 1
    assert_parity(loss, golden.tensor(case["loss"]), **scale, magnitude=largest, what="loss")
    assert_parity(gradient, golden.tensor(case["grad"]), **scale, what="gradient")


@pytest.mark.skipif(golden.directory != golden.GOLDEN, reason="of our own golden directory")
def test_most_records_are_compared() -> None:
    assert len(TESTS) > 150


def without_level(hp: dict[str, object]) -> dict[str, object]:
    """The options of a record without the ratio's level, which is "token" here."""
    return {name: value for name, value in hp.items() if name != "ratio_type"}


def loss_inputs(case: Case, *, weighs: bool) -> SimpleNamespace:
    dtype = dtype_of(case)
    names = ("trainer_logprobs", "inference_logprobs", "advantages")
    found = {name: golden.tensor(case[name], dtype) for name in names}
    optional = {
        theirs: golden.tensor(case[name], dtype) if case.get(name) and used else None
        for theirs, name, used in (
            ("teacher_logprobs", "ref_logprobs", True),
            ("loss_weights", "loss_weights", weighs),
        )
    }
    found["trainer_logprobs"].requires_grad_()
    return SimpleNamespace(**found, **optional, loss_mask=torch.tensor(case["loss_mask"], dtype=torch.bool))
