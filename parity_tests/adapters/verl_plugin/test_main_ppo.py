"""verl's real `main_ppo`, two steps on a CPU: our losses by YAML alone, and composer_sync's channels.

Each run is a process of its own with Ray, TransferQueue and FSDP2 (`on_a_cpu`), and takes a minute.
"""

from pathlib import Path

import pytest

from composer_plugins.recipes.verl.on_a_cpu.runner import run
from parity_tests.rigs.verl_trained import OURS, REFERENCE, SYNC, THEIRS, Trained, apart, composers, finished

RATIO, *CLIPPED = (f"actor/composer/policy/{name}" for name in ("ratio", "clip_frac_low", "clip_frac_high"))
HEALTH = ("k3_kl", "ratio_mean", "ratio_outside_frac", "chi2", "clip_frac", "zero_adv_frac")
VERLS = {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}

HINT = ("+algorithm.composer.hint_weight=0.5",)
REPLAY = ("+algorithm.composer.replay_weight=0.5", "+algorithm.composer.replay_loss=dpo")
ALL = (
    *SYNC,
    *REFERENCE,
    *HINT,
    "+algorithm.composer.hint_divergence=taid",
    "+algorithm.composer.hint_params={t: 1.0}",
    "+algorithm.composer.hint_t_start=0.4",
    "+algorithm.composer.hint_top_k=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",  # so that four rows are not scored
    *REPLAY,
)
RANKS = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "ray_kwargs.ray_init.num_gpus=2",
)
LIVE = (
    *SYNC,
    *HINT,
    "+algorithm.composer.hint_divergence=sampled_token",
    "+algorithm.composer.hint_teacher=live",
    "+algorithm.composer.replay_weight=0.5",
    "+algorithm.composer.replay_loss=simpo",
)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [OURS, SYNC], ids=["verl's trainer", "composer_sync"])
def test_composer_without_a_channel_has_the_parameters_of_verls_grpo_bit_for_bit(
    lines: tuple[str, ...], trained: Trained
) -> None:
    ours, theirs = finished(trained(*lines)), finished(trained(*THEIRS))
    for mine, own in zip(ours.parameters, theirs.parameters, strict=True):
        assert apart(mine, own) == 0
    for step in composers(ours):
        assert step.keys() == {RATIO, *CLIPPED} and all(0 < step[name] < 1 for name in CLIPPED)
    for step in ours.metrics:
        assert {f"actor/composer/health/{name}" for name in HEALTH} <= step.keys()
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
def test_three_channels_train_with_a_frozen_teacher_of_k_entries_and_dpo(trained: Trained) -> None:
    done = finished(trained(*ALL))
    for step in done.metrics:
        assert step["timing_s/adv"] > step["timing_s/composer_teacher"] > 0
        assert step["timing_s/update_actor"] > step["timing_s/composer_pairs"] > 0
        assert step.keys() > VERLS
    first, second = composers(done)
    assert {RATIO, *CLIPPED} < first.keys() == second.keys()
    assert first["actor/composer/hint/row_frac"] == 0.75  # as the data set has them
    assert (first["actor/composer/hint/t"], second["actor/composer/hint/t"]) == (0.4, 1.0)
    # At the first step the policy is the reference: DPO of a margin of 0.
    assert first["actor/composer/replay/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert first["actor/composer/replay/rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert second["actor/composer/replay/loss"] < first["actor/composer/replay/loss"] - 0.01
    assert second["actor/composer/replay/rewards/margins"] > 0
    for name in ("hint/loss", "hint/kl"):
        assert first[f"actor/composer/{name}"] != second[f"actor/composer/{name}"] > 0
    assert first["actor/composer/replay/pairs"] == 5


@pytest.mark.slow
def test_three_channels_train_on_two_ranks_with_a_live_teacher_and_simpo(trained: Trained) -> None:
    first, second = composers(finished(trained(*LIVE, *RANKS)))
    assert first["actor/composer/hint/loss"] != second["actor/composer/hint/loss"]
    chosen, rejected = (f"actor/composer/replay/rewards/{side}" for side in ("chosen", "rejected"))
    moved = [second[name] - first[name] for name in (chosen, rejected)]
    assert moved[0] > moved[1]


@pytest.mark.slow
def test_each_channel_changes_the_parameters(trained: Trained) -> None:
    alone = finished(trained(*SYNC)).parameters[-1]
    for lines in (ALL, (*LIVE, *RANKS)):
        assert apart(finished(trained(*lines)).parameters[-1], alone) > 1e-3


@pytest.mark.slow
def test_a_row_that_does_not_fit_ends_the_run_before_a_model_is_loaded(trained: Trained) -> None:
    done = trained(*LIVE, "data.max_response_length=600")
    assert done.code not in (0, None) and not done.parameters
    message = "DataError: training data, row 1, prompt + hint + data.max_response_length: "
    assert message in done.log, done.log[-6000:]
    assert "Started a local Ray instance" in done.log  # so it was the real entry point's


@pytest.mark.slow
def test_no_process_survives_a_run_that_is_cut_off(tmp_path: Path) -> None:
    cut = run(tmp_path, *THEIRS, until="Started a local Ray instance")
    assert cut.code is None and "Started a local Ray instance" in cut.log
    assert any("raylet" in process for process in cut.survivors), cut.survivors
    assert not cut.left
