"""slime itself, from a checkout: cispo@slime and its other losses equal ours, on one and on two ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.conformance.slime_claims import claims, upstream
from composer_plugins.conformance.stubs import source
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.draws import Draw
from parity_tests.rigs.checkouts import checkout, with_checkout
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python
from parity_tests.rigs.slime_ranks import step

pytestmark = [with_checkout("slime"), pytest.mark.filterwarnings("ignore")]
LOADED = upstream.load(checkout("slime")) if source("slime") else None
CLAIMS = claims.claims(LOADED) if LOADED else []


@pytest.mark.parametrize("claim", CLAIMS or [None], ids=str)
def test_the_loss_equals_slime(claim: Claim) -> None:
    """ppo@slime, gspo@slime, cispo@slime, opsm@slime, tis@slime, icepop@slime."""
    row = compared(claim, CASES)
    assert row.status == "equal", row.note


def on_ranks(case: dict[str, Any], folder: Path, ranks: int) -> list[Tensor]:
    """Loss and gradient of a step on so many ranks of context parallelism."""
    folder.mkdir()
    torch.save(case, folder / "case.pt")
    words = [sys.executable, "-m", "parity_tests.rigs.slime_ranks", str(checkout("slime")), str(folder)]
    running = [subprocess.Popen([*words, str(rank), str(ranks)], cwd=ROOT) for rank in range(ranks)]
    assert [one.wait(300) for one in running] == [0] * ranks
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    total: list[Tensor] = found[0]
    if case["options"].get("calculate_per_token_loss"):  # each rank has its own share
        total = [sum(parts) / ranks for parts in zip(*found, strict=True)]  # type: ignore[misc]
    return total


@pytest.mark.parametrize(
    "options",
    [
        {"composer": {"policy": "gspo@slime"}},
        {"composer": {"policy": "cispo", "policy_params": {"clip_high": 4.0}}, "use_tis": True},
        {"composer": {"policy": "opsm@slime", "mode": "seq-mean-token-sum"}, "entropy_coef": 0.01},
        {
            "composer": {"policy": "grpo@slime"},
            **{"use_kl_loss": True, "kl_loss_coef": 0.1, "calculate_per_token_loss": True},
        },
    ],
    ids=["gspo", "cispo", "opsm", "per token"],
)
def test_context_parallelism_leaves_value_and_gradient(options: dict[str, Any], tmp_path: Path) -> None:
    """As slime's own tests/test_loss_cp_invariance.py: two gloo ranks with two chunks of each response."""
    assert LOADED is not None
    logits, batch = claims.drawn_batch(Draw(3))
    batch |= {name: x.detach() for name, x in batch.items() if isinstance(x, Tensor)}
    batch = {k: [one.clone() if isinstance(one, Tensor) else one for one in x] for k, x in batch.items()}
    case = {"options": options | claims.OURS, "batch": batch, "logits": logits.detach(), "size": 4}
    want = step(LOADED, sys.modules["megatron.core.mpu"], case, 1)
    got = on_ranks(case, tmp_path / "two", 2)
    assert_parity(got[0], want[0], terms=40, dtype=torch.float32, magnitude=max(1.0, float(want[0].abs())))
    assert_parity(got[1], want[1], terms=40, dtype=torch.float32, what="gradient")


@pytest.mark.skipif("MILES_SOURCE" not in os.environ, reason="no checkout of Miles: MILES_SOURCE=DIR")
def test_the_losses_of_miles_equal_ours() -> None:
    """Through its own dispatcher, in a process of its own: a loss asks which of the two runs it."""
    found = python("-m", "parity_tests.rigs.miles_one_rank", os.environ["MILES_SOURCE"])
    assert found.returncode == 0, found.stderr
    differences = [float(line.split()[1]) for line in found.stdout.splitlines()]
    assert len(differences) > 15 and max(differences) < 1e-6
