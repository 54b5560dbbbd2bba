"""One worker of verl's, its engine real (FSDP2 over gloo), on a fixed batch: the hint is learned."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.recipes.verl.on_a_cpu.runner import TIMEOUT, end, environment, prepared, short_paths
from parity_tests.rigs.paths import ROOT

WORKER = "benchmarks.verl_worker"
ALONE = {"policy_weight": 0.0, "hint_weight": 1.0, "hint_teacher": "live"}


def updates(folder: Path, node: dict[str, Any]) -> list[dict[str, float]]:
    """Our metrics of six updates on the same rows, in a process of its own that leaves none behind."""
    token = prepared(folder)
    variables = environment(folder, token)
    try:
        with short_paths() as (_, python):
            done = subprocess.run(
                [python, "-m", WORKER, str(folder), json.dumps(node)],
                cwd=folder,
                env=variables | {"PYTHONPATH": os.pathsep.join((str(ROOT), variables["PYTHONPATH"]))},
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                start_new_session=True,
            )
    finally:
        left = end(token, grace=10.0)[1]
    assert not left
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "hint",
    [
        {"hint_divergence": "jsd", "hint_top_k": 16},
        {"hint_divergence": "sampled_token", "hint_params": {"estimator": "k2"}},
    ],
    ids=["top-k JSD with a tail", "sampled token"],
)
def test_the_hint_loss_falls_with_every_update_on_a_fixed_batch(tmp_path: Path, hint: dict[str, Any]) -> None:
    steps = updates(tmp_path, ALONE | hint)
    losses = [metrics["actor/composer/hint/loss"] for metrics in steps]
    assert len(losses) == 6 and losses[-1] > 0
    assert all(later < before for before, later in pairwise(losses)), losses
    assert losses[-1] < 0.9 * losses[0], losses
    # The KL is that of the first update, of whose policy the old log-probabilities are.
    kl = [metrics["actor/composer/hint/kl#sum"] for metrics in steps]
    assert abs(kl[0]) > 0.1 and kl == [kl[0]] * 6
