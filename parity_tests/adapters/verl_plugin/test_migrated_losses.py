"""Losses moved to verl: its `ppo_loss` has the value and the gradient of the formula."""

import pytest

from docs.generator.path_of_verl import value_and_gradient
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs


@pytest.mark.filterwarnings("ignore:.*is reduced by")
@pytest.mark.parametrize("name", runs("verl"))
def test_verl_trains_what_was_written(name: str) -> None:
    for written, objective in moved("verl", name):
        given = batch(nan=True)
        assert_trains(*value_and_gradient(written.table, given), expected(objective, given))
