"""The claims of `conform prime-rl` hold, with formulas in the place of a checkout.

`adapters/prime_rl_plugin/test_live.py` makes the same comparison with a checkout, where one is given. Ours
equal its recorded numbers in `adapters/prime_rl_plugin/test_golden.py`, and so do the formulas.
"""

import pytest

from composer_plugins.conformance.prime_rl_claims.claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.prime_rl import PRIME_RL
from parity_tests.rigs.prime_rl_formulas import FORMULAS, Double

EVERY = {claim.theirs: claim for claim in claims(Double())}  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", EVERY)
def test_its_losses_equal_ours_with_the_kwargs_of_the_table(kind: str) -> None:
    row = compared(EVERY[kind], CASES)
    assert row.status == "equal", row.note


def test_every_loss_of_the_table_is_compared() -> None:
    assert {one.options["type"] for one in PRIME_RL.losses} == EVERY.keys() == FORMULAS.keys()
