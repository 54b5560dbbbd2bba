"""One worker of verl's, its engine real (FSDP2 over gloo), on a fixed batch: the hint is learned."""

import json
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.verl_process import run_module

ALONE = {"policy_weight": 0.0, "hint_weight": 1.0, "hint_teacher": "live"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hint",
    [
        {"hint_divergence": "jsd", "hint_top_k": 16},
        {"hint_divergence": "sampled_token", "hint_params": {"estimator": "k2"}},
    ],
    ids=["top-k JSD with a tail", "sampled token"],
)
def test_the_hint_loss_falls_with_every_update_on_a_fixed_batch(hint: dict[str, Any]) -> None:
    """Six updates on the same rows."""
    done = run_module("benchmarks.verl_worker", json.dumps(ALONE | hint), capture=True)
    assert done.returncode == 0, done.stderr[-6000:]
    steps: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    losses = [metrics["actor/composer/hint/loss"] for metrics in steps]
    assert len(losses) == 6 and losses[-1] > 0
    assert all(later < before for before, later in pairwise(losses)), losses
    assert losses[-1] < 0.9 * losses[0], losses
    # The KL is that of the first update, of whose policy the old log-probabilities are.
    kl = [metrics["actor/composer/hint/kl#sum"] for metrics in steps]
    assert abs(kl[0]) > 0.1 and kl == [kl[0]] * 6
