"""Losses moved to PRIME-RL: a checkout's `compute_loss` has the value and the gradient of the formula."""

import tomllib

import pytest
import torch

from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs
from parity_tests.rigs.prime_rl_checkout import with_checkout


@with_checkout
@pytest.mark.filterwarnings("ignore:.*published with the reduction")
@pytest.mark.parametrize("name", runs("prime-rl"))
def test_prime_rl_trains_what_was_written(upstream: Upstream, name: str) -> None:
    """Masked tokens are NaN but in the policy's own log-probabilities, which PRIME-RL multiplies by 0."""
    for written, objective in moved("prime-rl", name):
        given = batch(nan=True)._replace(logprobs=batch().logprobs)
        tokens, leaves = int(given.mask.sum()), [row.clone().requires_grad_() for row in given.logprobs]
        pack = Pack(leaves, [*given.rollout], None, [*given.advantages], [*given.mask])
        loss_fn = upstream.loss_fn(**tomllib.loads(written.text)["trainer"]["loss"])
        value = upstream.compute_loss(pack, loss_fn, tokens)[0]
        gradient = torch.stack(torch.autograd.grad(value, leaves))
        assert_trains(value, gradient, expected(objective, given))
