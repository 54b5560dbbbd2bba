"""`migrate` between all frameworks whose configs can be read, but without TRL: exact, or named."""

import pytest

from composer_plugins.objective.resolve import readable
from parity_tests.rigs.moved_losses import FRAMEWORKS, LOSSES, check_pair, check_terms, pairs

WITHOUT_TRL = [one for one in FRAMEWORKS if one != "trl"]


@pytest.mark.parametrize(("source", "target", "name"), pairs(WITHOUT_TRL))
def test_a_migration_is_exact_or_names_what_the_target_cannot_do(source: str, target: str, name: str) -> None:
    check_pair(source, target, name)


@pytest.mark.parametrize("framework", WITHOUT_TRL)
def test_a_kl_or_a_correction_that_a_framework_lacks_stops_no_migration(framework: str) -> None:
    check_terms(framework)


def test_every_framework_with_a_config_is_tested() -> None:
    assert {*FRAMEWORKS} == {*readable()} and len(LOSSES) >= 12
