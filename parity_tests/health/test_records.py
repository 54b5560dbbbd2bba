"""What adapters record: the loss that ran, recomputed from the record, is the loss that they returned."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_plugins.adapters.prime_rl_plugin import loss_fn as prime_rl
from composer_plugins.batches import load, steps
from composer_plugins.comparing import Step
from parity_tests.rigs.worlds import World


@pytest.mark.parametrize("policy", ["dppo_tv", "cispo", "gspo"])
@pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")  # of gspo's reduction
def test_prime_rls_sequences_are_recorded_by_update(policy: str, tmp_path: Path) -> None:
    """Sixteen sequences are a step, and the loss of each is the sum over its tokens."""
    batch, total = World("bf16").batch(rows=32), 0.0
    options = {"policy": policy, "record_batches": str(tmp_path), "old_policy": "rollout"}
    options |= {"old_policy": None} if policy == "dppo_tv" else {}
    for row in range(32):
        one = {name: x[row] for name, x in batch.items()}
        given = {"trainer_logprobs": one["logprobs"], "inference_logprobs": one["rollout_logprobs"]}
        given |= {"advantages": one["advantages"].expand(24), "loss_mask": one["mask"]}
        none = dict.fromkeys(("ref_logprobs", "loss_weights", "teacher_logprobs"))
        loss = prime_rl(SimpleNamespace(**given, **none), **options)
        total += float(loss[0].detach()) if row >= 16 else 0.0
    assert steps(tmp_path) == [0, 1] and len(load(tmp_path, step=1)) == 16
    found = Step.read(tmp_path).reproduced()
    assert found["equal"] and found["recomputed"] == pytest.approx(total, rel=1e-5, abs=1e-7)
