"""The claims of `conform prime-rl` hold for every generation, with formulas in the place of a checkout.

`adapters/prime_rl_plugin/test_live.py` makes the same comparison with a checkout, where one is given. Ours
equal its recorded numbers in `adapters/prime_rl_plugin/test_golden.py`, and so do the formulas.
"""

import pytest

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.prime_rl_claims.claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.prime_rl import PRIME_RL
from parity_tests.rigs.prime_rl_formulas import DOUBLES, FORMULAS

pytestmark = pytest.mark.filterwarnings(
    "ignore:prime-rl. it is newer than the newest", "ignore:.*multiplies the advantages with the hint"
)
EVERY = {(since, claim.theirs): claim for since, double in DOUBLES.items() for claim in claims(double)}


@pytest.mark.thorough
@pytest.mark.parametrize("claim", EVERY.values(), ids=[f"{kind} of {since}" for since, kind in EVERY])
def test_its_losses_equal_ours_with_the_kwargs_of_the_table(claim: Claim) -> None:
    row = compared(claim, CASES)
    assert row.status == "equal", row.note


def test_every_loss_of_the_table_is_compared() -> None:
    found = {(since, one.options["type"]) for one in PRIME_RL.losses for since in PRIME_RL.releases_of(one)}
    assert found == EVERY.keys() == {(since, kind) for since, kinds in FORMULAS.items() for kind in kinds}
