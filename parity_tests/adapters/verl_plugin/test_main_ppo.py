"""verl's real `main_ppo`, two steps on a CPU: ours by YAML alone, in both trainers, beside its own GRPO.

Each run is a process of its own with Ray, TransferQueue and FSDP2 (`verl_cpu/`), and takes a minute.
"""

from pathlib import Path

import pytest

from composer_plugins.recipes.verl.on_a_cpu.runner import run
from parity_tests.rigs.verl_trained import OURS, THEIRS, Trained, apart, composers, finished

RATIO, *CLIPPED = (f"actor/composer/policy/{name}" for name in ("ratio", "clip_frac_low", "clip_frac_high"))

VERLS = {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}


@pytest.mark.slow
def test_composer_by_yaml_alone_has_the_parameters_of_verls_grpo_bit_for_bit(trained: Trained) -> None:
    ours, theirs = finished(trained(*OURS)), finished(trained(*THEIRS))
    for mine, own in zip(ours.parameters, theirs.parameters, strict=True):
        assert apart(mine, own) == 0
    for step in composers(ours):
        assert step.keys() == {RATIO, *CLIPPED} and all(0 < step[name] < 1 for name in CLIPPED)
    for mine, own in zip(ours.metrics, theirs.metrics, strict=True):
        assert mine["actor/pg_loss"] == pytest.approx(own["actor/pg_loss"], rel=1e-5)
        assert sum(mine[name] for name in CLIPPED) == pytest.approx(own["actor/pg_clipfrac"], rel=1e-5)
        for name in VERLS:
            assert mine[name] == pytest.approx(own[name], rel=1e-5, abs=1e-9)
        assert own["actor/pg_clipfrac_lower"] > 0  # every branch of the loss was taken


@pytest.mark.slow
def test_composer_trains_in_the_legacy_trainer(trained: Trained) -> None:
    done = finished(trained(*OURS, "trainer.use_v1=False"))
    assert "Legacy trainer" in done.log
    assert all(step[RATIO] > 0 for step in composers(done))


@pytest.mark.slow
def test_no_process_survives_a_run_that_is_cut_off(tmp_path: Path) -> None:
    cut = run(tmp_path, *THEIRS, until="Started a local Ray instance")
    assert cut.code is None and "Started a local Ray instance" in cut.log
    assert any("raylet" in process for process in cut.survivors), cut.survivors
    assert not cut.left
