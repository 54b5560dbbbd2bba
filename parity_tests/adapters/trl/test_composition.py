"""The mixin among the other things a trainer does: evaluation, mixed precision, somebody's subclass."""

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerLossMixin
from parity_tests.support import tiny

ALL = {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3}


def test_the_logged_losses_add_up_in_training_and_in_evaluation() -> None:
    made = tiny.trainer(
        **ALL,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=4,
        arguments={"eval_dataset": Dataset.from_list(tiny.rows())},
    )
    made.train()
    for prefix, entry in (("", made.state.log_history[0]), ("eval_", made.evaluate())):
        policy, hint, replay = (
            float(entry[f"{prefix}composer/{channel}/loss"]) for channel in ("policy", "hint", "replay")
        )
        assert float(entry[f"{prefix}loss"]) == pytest.approx(policy + 0.7 * hint + 0.3 * replay, rel=1e-3)
        assert f"{prefix}composer/replay/rewards/margins" in entry


def test_weights_scale_their_channel() -> None:
    made = tiny.trainer(**ALL)
    inputs = tiny.batch(made)
    parts = []
    for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.7, 0.3)):
        names = ("policy_weight", "hint_weight", "replay_weight")
        made._composer = made._composer.model_copy(update=dict(zip(names, weights, strict=True)))
        parts.append(tiny.loss_and_gradient(made, inputs)[1])
    policy, hint, replay, together = parts
    assert tiny.relative_difference(0.5 * policy + 0.7 * hint + 0.3 * replay, together) <= 1e-6


def test_bf16_autocast_trains_with_finite_loss() -> None:
    made = tiny.trainer(**ALL, bf16=True, max_steps=2)
    made.train()
    losses = [float(e["loss"]) for e in made.state.log_history if "loss" in e]
    assert len(losses) == 2 and all(torch.tensor(losses).isfinite())


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    (plain,) = tiny.gradients(tiny.trainer(**ALL))
    (checkpointed,) = tiny.gradients(tiny.trainer(**ALL, gradient_checkpointing=True))
    assert tiny.relative_difference(plain, checkpointed) <= 1e-6


def test_mixed_into_ones_own_trainer() -> None:
    """The five lines of the README, over a trainer that changes its own loss."""

    class Doubled(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            return 2 * super()._compute_loss(model, inputs)

    class Mine(ComposerLossMixin, Doubled):
        pass

    (single,) = tiny.gradients(tiny.trainer(loss_type="grpo"))
    (doubled,) = tiny.gradients(tiny.trainer(Mine, loss_type="grpo"))
    assert tiny.relative_difference(2 * single, doubled) <= 1e-6


def test_gmpos_policy_term_stands_beside_our_channels() -> None:
    class Mine(ComposerLossMixin, GMPOTrainer):
        pass

    (with_hint,) = tiny.gradients(tiny.trainer(Mine, hint_weight=1.0))
    (alone,) = tiny.gradients(tiny.trainer(Mine))
    (hint,) = tiny.gradients(tiny.trainer(hint_weight=1.0, policy_weight=0.0))
    assert tiny.relative_difference(alone + hint, with_hint) <= 1e-6


def test_truncated_completions_push_in_no_channel_but_replay() -> None:
    options = {"mask_truncated_completions": True, "hint_weight": 1.0}
    inputs = tiny.batch(tiny.trainer(**options))
    empty = inputs["completion_mask"].sum(1) == 0
    assert empty.any() and not empty.all()
    assert not inputs["hint_mask"][empty].any()


def test_the_input_rows_are_left_as_they_were() -> None:
    made = tiny.trainer(**ALL)
    rows = [row for row in tiny.rows() for _ in range(4)]
    before = copy.deepcopy(rows)
    made.model.train()
    made._generate_and_score_completions(rows)
    assert rows == before
