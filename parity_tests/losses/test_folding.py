"""Which policy losses are proportional to the advantages, as frameworks need that divide those."""

import pytest

from composer_plugins.cli.recorded import examples
from composer_plugins.frameworks.skyrl import SKYRL
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.folding import is_proportional
from composer_plugins.losses.row import Loss
from parity_tests.rigs.every import rows

# SkyRL divides the advantages; and these have every input there.
ROWS = [one for one in rows() if one.kind == "policy" and not one.over_batch and not SKYRL.missing(one)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_which_of_its_parameters_weigh_a_penalty(row: Loss) -> None:
    """With every weight of a penalty at 0 the loss is proportional, and with one of them it is not."""
    needed = examples(row)
    off = {name: 0.0 for name, one in row.parameters.items() if one.weighs_a_penalty}
    assert is_proportional(choose("policy", row.name, needed | off))
    for name in off:
        assert not is_proportional(choose("policy", row.name, needed | off | {name: 1e-3}))
