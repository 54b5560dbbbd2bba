"""composer_sync's hooks into verl's trainer: what is set, added to the batch, and removed again."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync

from composer_plugins.adapters.verl_plugin.options import asked_in_a_run
from composer_plugins.adapters.verl_plugin.sync_trainer import trainer as adapter
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import REPLAY, TEACHER
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.sync_trainer.workers import TopKLogprobsWorker
from composer_plugins.errors import ComposerWarning, DataError
from parity_tests.rigs.verl_queue import Model, Queue, rollout
from parity_tests.rigs.verl_trainer import LIVE, SIMPO, checked

# torchdata's loader calls it, and torch 2.13 warns.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
ADVANTAGE = LIVE | {"hint_estimator": "advantage"}
TOP = LIVE | {"hint_divergence": "jsd", "hint_top_k": 4}
ROWS = 16  # two mini-batches of eight
Started = Callable[[dict[str, Any]], Any]


class Workers(Model):
    """The actor's workers, which record the batches they get."""

    def set_loss_fn(self, loss: Any) -> None:
        self.loss = loss

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        """As verl's: metrics come back, those of ours as sums."""
        self.updated = batch.extra_info
        self.keys = batch.keys
        self.rows = [dict(self.queue.rows[batch.partition_id, key]) for key in batch.keys]
        sums = {"actor/composer/policy/ratio#sum": 6.0, "actor/composer/policy/#tokens": 4.0}
        return {"metrics": {"actor/mfu": 0.0, **sums}}


@pytest.fixture
def started(make: Any, queue: Queue) -> Started:
    """A trainer with its data read and its workers there, and a batch of sixteen rows."""

    def one(node: dict[str, Any]) -> Any:
        trainer = checked(make(node))
        trainer.actor_rollout_wg, trainer.ref_in_actor = Workers(queue, seed=1), False
        trainer.actor_rollout_wg._dispatch_info = {"actor": [0]}
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
        trainer.global_steps, trainer.timing_raw = 1, {}
        if not node:
            return trainer, queue, None
        rows = [row(trainer, i // 4) for i in range(ROWS)]
        return trainer, queue, queue.batch_of(rows, seq_len=1)

    return one


def row(trainer: Any, i: int) -> dict[str, Any]:
    columns = {
        "privileged_context": "It is so.",
        "chosen": "yes" if i else None,
        "rejected": "no" if i else None,
    }
    numbers = {"old_log_probs": torch.tensor([-1.0, -2.0]), "advantages": torch.zeros(2)}
    numbers["rollout_is_weights"] = torch.ones(2)
    return rollout(trainer, i, torch.tensor([65 + i, 66]), **numbers, **columns)


def test_replay_alone_sets_our_loss_and_stands_beside_the_batch_for_one_update(started: Started) -> None:
    trainer, queue, batch = started(SIMPO)
    trainer.on_init_end()
    group = trainer.actor_rollout_wg
    assert isinstance(group.loss, ComposerLoss) and group.loss.channels.replay
    assert group.loss.actor.loss_agg_mode == "token-mean"
    metrics: dict[str, Any] = {}
    assert trainer._update_actor(batch, metrics).keys == batch.keys
    assert trainer.actor_rollout_wg is group
    # Three pairs: six rows, filled up to a whole micro-batch of four in each of two mini-batches.
    assert group.updated["mini_batch_size"] == 8 + 4 and group.updated["global_batch_size"] == 8
    assert len(group.keys) == ROWS + 8 and [key for key in group.keys if key in batch.keys] == batch.keys
    assert all(REPLAY in seen for seen in group.rows)
    assert sum(bool(seen[REPLAY].any()) for seen in group.rows) == 6
    replayed = [seen for key, seen in zip(group.keys, group.rows, strict=True) if key not in batch.keys]
    assert all(len(seen["rollout_is_weights"]) == len(seen["responses"]) for seen in replayed)
    assert {key for _, key in queue.rows} == set(batch.keys)  # and gone
    assert trainer.timing_raw.keys() == {"composer_pairs"}
    assert metrics["actor/composer/policy/ratio"] == 1.5 and not [name for name in metrics if "#" in name]


def test_what_composer_sync_overrides_is_verls() -> None:
    ours = {name for name in vars(adapter.ComposerTrainer) if not name.startswith(("__", "_abc"))}
    assert {name for name in ours if not hasattr(PPOTrainerSync, name)} == {"taid_t", "trainer_mode"}


def test_without_a_channel_verls_loss_stays(started: Started) -> None:
    trainer, _, _ = started({})
    trainer.on_init_end()
    assert not hasattr(trainer.actor_rollout_wg, "loss")


def test_a_hint_of_distributions_tells_the_engine_to_show_its_logits(started: Started) -> None:
    for node, shown in ((TOP, True), (LIVE, False)):
        trainer, _, batch = started(node)
        trainer._update_actor(batch, {})
        assert trainer.actor_rollout_wg.updated["distillation_use_topk"] is shown
        assert trainer.actor_rollout_wg.updated["mini_batch_size"] == 8


@pytest.mark.parametrize("node", [LIVE, ADVANTAGE])
def test_the_teacher_is_asked_after_the_advantages_which_are_verls(
    started: Started, node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verls(self: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        asked_in_a_run(node, "advantage", None)  # an estimator of ours, where the channels are delivered
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", verls)
    trainer, queue, batch = started(node)
    trainer._compute_advantage(batch, {})
    seen = queue.rows["train", "row_0"]
    assert bool(seen["advantages"].any()) == ("hint_estimator" in node)
    assert (TEACHER in seen) == ("hint_estimator" not in node)
    assert trainer.timing_raw.keys() == {"composer_teacher"}


@pytest.mark.parametrize("node", [LIVE, ADVANTAGE])
def test_a_hint_is_not_put_at_tokens_of_a_mask_of_other_numbers(
    started: Started, node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside verl's own estimator, which does not look."""
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer, queue, batch = started(node)
    for one in queue.rows.values():
        one["response_mask"] = torch.tensor([1.0, 0.5])
    with pytest.raises(DataError, match=r"response_mask: it holds 0\.5, and a mask holds 0 and 1"):
        trainer._compute_advantage(batch, {})


def test_a_hint_of_distributions_takes_our_worker(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    models = (Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)

    def verls(self: Any) -> None:
        self.role_worker_mapping = dict.fromkeys((*models, Role.Critic), "verl's")

    monkeypatch.setattr(PPOTrainerSync, "_init_resource_pool_mgr", verls)
    monkeypatch.setattr(adapter.ray, "remote", lambda worker: worker)
    for node, wanted in ((TOP, set(models)), (LIVE, set())):
        trainer, _, _ = started(node)
        trainer._init_resource_pool_mgr()
        workers = trainer.role_worker_mapping
        assert {role for role, worker in workers.items() if worker is TopKLogprobsWorker} == wanted


def test_a_step_is_measured_with_the_entropies_and_what_the_engine_returned(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout engine's distribution is cut, so each of its probabilities is larger by the same factor."""
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    monkeypatch.setattr(adapter, "add_teacher_logprobs", lambda trainer, batch, metrics: batch)
    trainer, queue, batch = started(LIVE)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(batch, metrics)
    assert metrics == {}  # verl has no entropies in bypass mode
    for one in queue.rows.values():
        one |= {"rollout_log_probs": one["old_log_probs"] + 0.1, "entropy": torch.tensor([1.0, 2.5])}
    with pytest.warns(ComposerWarning, match="^composer/health/ratio_mean: .* mean ratio 0.905") as caught:
        for _ in range(8):
            trainer._compute_advantage(batch, metrics)
    assert len(caught) == 1 and metrics["composer/health/kl"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["composer/health/surprise"] == pytest.approx(-0.25)
