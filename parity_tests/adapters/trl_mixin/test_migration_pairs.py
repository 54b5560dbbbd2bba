"""Losses moved from TRL and to it: each difference is named, and TRL's own code has value and gradient."""

import pytest

from docs.generator.path_of_trl import value_and_gradient
from parity_tests.rigs.moved_losses import (
    FRAMEWORKS,
    assert_trains,
    batch,
    check_pair,
    check_terms,
    expected,
    moved,
    pairs,
    runs,
)

WITH_TRL = [one for one in pairs(FRAMEWORKS) if "trl" in one.values]


@pytest.mark.parametrize(("source", "target", "name"), WITH_TRL)
def test_a_migration_is_exact_or_names_what_the_target_cannot_do(source: str, target: str, name: str) -> None:
    check_pair(source, target, name)


def test_a_kl_or_a_correction_that_trl_lacks_stops_no_migration() -> None:
    check_terms("trl")


@pytest.mark.parametrize("name", runs("trl"))
def test_trl_trains_what_was_written(name: str) -> None:
    """Through `_compute_loss`. TRL multiplies masked tokens by 0, so none is NaN."""
    for written, objective in moved("trl", name):
        assert_trains(*value_and_gradient(written.table, batch()), expected(objective, batch()))
