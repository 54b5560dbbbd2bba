"""`migrate` between all frameworks whose configs can be read, but without TRL: exact, or named."""

from functools import partial

import pytest
import torch

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.objective.resolve import readable
from parity_tests.rigs.moved_losses import (
    FRAMEWORKS,
    LOSSES,
    assert_trains,
    batch,
    check_pair,
    check_terms,
    every,
    expected,
    moved,
    pairs,
)
from parity_tests.rigs.prime_rl_doubles import compute_loss

WITHOUT_TRL = [one for one in FRAMEWORKS if one != "trl"]


@pytest.mark.parametrize(("source", "target", "name"), pairs(WITHOUT_TRL))
def test_a_migration_is_exact_or_names_what_the_target_cannot_do(source: str, target: str, name: str) -> None:
    check_pair(source, target, name)


@pytest.mark.parametrize("framework", WITHOUT_TRL)
def test_a_kl_or_a_correction_that_a_framework_lacks_stops_no_migration(framework: str) -> None:
    check_terms(framework)


def test_every_framework_with_a_config_is_tested() -> None:
    assert {*FRAMEWORKS} == {*readable()} and len(LOSSES) >= 12 and len(every("prime-rl")) > 40


@pytest.mark.filterwarnings("ignore:.*published with the reduction")
@pytest.mark.parametrize("name", every("prime-rl"))
def test_prime_rl_trains_what_was_written(name: str) -> None:
    """Summed as its trainer sums it: adapters/prime_rl_plugin/test_migrated_losses.py has a checkout's."""
    for written, objective in moved("prime-rl", name):
        given = batch(nan=True)._replace(logprobs=batch().logprobs)
        leaves = [row.clone().requires_grad_() for row in given.logprobs]
        pack = Pack(leaves, [*given.rollout], None, [*given.advantages], [*given.mask])
        function = partial(loss_fn, **written.table["trainer"]["loss"]["kwargs"])
        value = compute_loss(pack, function, int(given.mask.sum()))[0]
        assert_trains(value, torch.stack(torch.autograd.grad(value, leaves)), expected(objective, given))
