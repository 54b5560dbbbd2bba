"""What a TRL run records: the losses that ran, recomputed from it, are those that TRL logged."""

from pathlib import Path
from typing import Any

import pytest

from composer_plugins.batches import load, steps
from composer_plugins.comparing import Step
from parity_tests.rigs import tiny

RUNS: dict[str, dict[str, Any]] = {
    "the paper's denominator": {"policy": "gspo"},
    "tokens of the generation": {"policy": "dapo"},
    "a constant length": {"policy": "dr_grpo"},
    "micro-batches": {
        "policy": "sapo",
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
    },
    "bnpo": {"policy": "grpo", "loss_type": "bnpo", "policy_params": {"clip_high": 0.3}},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_of_a_record_is_the_loss_that_trl_logged(name: str, tmp_path: Path) -> None:
    made = tiny.trainer(**RUNS[name], record_batches=str(tmp_path), record_every=2, max_steps=3)
    logged = tiny.logged(made, "composer/policy/loss")
    assert steps(tmp_path) == [0, 2]
    for step in (0, 2):
        found = Step.read(tmp_path, step).reproduced()
        assert found is not None and found["equal"]
        assert found["recomputed"] == pytest.approx(logged[step], rel=1e-4, abs=1e-7)


def test_the_channels_and_trls_own_loss_are_recorded_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hint_weight": 1.0, "hint_divergence": "sampled_token", "replay_weight": 0.5}
    made = tiny.trainer(**options, record_batches=str(tmp_path))
    logged = tiny.logged(made, "composer/hint/loss")
    kinds = {one.about.kind: one for one in load(tmp_path)}
    assert kinds.keys() == {"policy", "divergence", "preference"}
    assert kinds["policy"].about.name == "dapo@trl" and kinds["policy"].about.loss is None
    found = Step.read(tmp_path, kind="divergence").reproduced()
    assert found is not None and found["equal"] and found["recomputed"] == pytest.approx(logged[0], rel=1e-4)
    assert {"logprobs", "advantages", "ids", "prompt_ids"} <= kinds["policy"].tensors.keys()
    assert {"chosen", "rejected", "ref_chosen", "ref_rejected"} <= kinds["preference"].tensors.keys()


def test_nothing_is_recorded_unless_asked_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    tiny.trainer(policy="grpo").train()
    file = tmp_path / "file"
    file.touch()
    with pytest.warns(UserWarning, match="record_batches: .* cannot be written"):
        tiny.trainer(policy="grpo", record_batches=str(file)).train()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
