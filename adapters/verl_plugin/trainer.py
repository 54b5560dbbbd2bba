"""`trainer.v1.trainer_mode: composer_sync`: verl's synchronous trainer, with hint and replay.

Of verl's own steps none is changed: after the advantages the teacher is asked, before the update the
pairs are put beside the batch, and the actor's loss function is ours, which calls verl's. With both
weights 0 nothing of this happens, and the run is verl's.
"""

import sys
from typing import Any

import ray
import transfer_queue
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs

from composer_plugins.adapters.verl_parts.fields import FROM_LOGITS, TAID_T
from composer_plugins.adapters.verl_parts.rules import NODE, TRAINER, carried, channels, chosen, named
from composer_plugins.adapters.verl_parts.run import LOSS_MODE, at, faults, is_ours, names
from composer_plugins.adapters.verl_plugin import shares
from composer_plugins.adapters.verl_plugin.config import node_of
from composer_plugins.adapters.verl_plugin.dataset import check_files, check_rows
from composer_plugins.adapters.verl_plugin.hint import teach
from composer_plugins.adapters.verl_plugin.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.means import settle
from composer_plugins.adapters.verl_plugin.replay import replayed
from composer_plugins.adapters.verl_plugin.workers import AnsweringWorker
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError

MODELS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


@register_trainer(TRAINER)
class ComposerTrainer(PPOTrainerSync):
    """verl's PPOTrainerSync, and the hint and replay channels of `algorithm.composer`.

    ConfigError before anything is started: an estimator or a loss that verl's registries do not have, an
    option that verl cannot deliver, a reference policy or a data column that a channel needs.
    """

    # verl compares the name of the mode with "sync" where it decides how to sample.
    trainer_mode = property(lambda self: "sync", lambda self, name: None)

    def __init__(self, config: DictConfig) -> None:
        import_external_libs(config.actor_rollout_ref.model.get("external_lib"))  # it may register names
        for error in names(config, ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
            raise error
        self.config = config
        self.channels = channels(node_of(config.algorithm))
        for fault in faults(config, self.channels):
            raise fault.error()
        check_chosen(config)
        self.is_verls = not (self.channels.hint or self.channels.replay)
        if not self.is_verls:
            check_files(self)
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if not self.is_verls:
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model).hf_config.get_text_config()
            check_entries(self.channels.config, model.vocab_size)
            self.positions = getattr(model, "max_position_embeddings", sys.maxsize)
            self.columns = check_rows(self)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.channels.compares_distributions:
            for role in self.role_worker_mapping.keys() & MODELS:
                self.role_worker_mapping[role] = ray.remote(AnsweringWorker)

    def on_init_end(self) -> None:
        """After verl's own: the actor's loss function."""
        super().on_init_end()
        if not self.is_verls:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(ComposerLoss(actor, node_of(self.config.algorithm)))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with carried():
            batch = super()._compute_advantage(batch, metrics)
        return teach(self, batch, metrics) if self.channels.hint else batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.is_verls:
            return super()._update_actor(batch, metrics)
        told: dict[str, Any] = {FROM_LOGITS: True} if self.channels.compares_distributions else {}
        if self.channels.config.hint_t_start is not None:
            told[TAID_T] = metrics["actor/composer/hint_t"] = self.taid_t()
        found = replayed(self, batch, metrics) if self.channels.replay else []
        whole, keys = batch, list[str]()
        if found:
            cut = shares.cut_of(self)
            keys, told["mini_batch_size"] = shares.put(self, batch, found, cut)
            tags = dict(zip(batch.keys, batch.tags, strict=True))
            order = shares.dealt(batch.keys, keys, cut)
            whole = KVBatchMeta(
                keys=order,
                tags=[tags.get(key, {}) for key in order],
                partition_id=batch.partition_id,
                extra_info=batch.extra_info,
            )
        group: Any = self.actor_rollout_wg
        self.actor_rollout_wg: Any = Told(group, told)
        try:
            super()._update_actor(whole, metrics)
            settle(metrics)
        finally:
            self.actor_rollout_wg = group
            if keys:
                transfer_queue.kv_clear(keys=keys, partition_id=batch.partition_id)
        return batch

    def taid_t(self) -> float:
        """TAID's t of this step: from hint_t_start at the first to hint_params.t at the last, linearly.

        A function of the step alone, and so the same after a resumption; the paper's adaptive part, which
        goes faster while the loss falls, would have a state to be saved.
        """
        assert self.channels.hint is not None and self.channels.config.hint_t_start is not None
        start, end = self.channels.config.hint_t_start, self.channels.hint.params["t"]
        progress = (self.global_steps - 1) / max(1, self.total_training_steps - 1)
        return float(start + (end - start) * min(1.0, progress))


class Told:
    """A worker group whose update is told more than verl's trainer tells it."""

    def __init__(self, group: Any, more: dict[str, Any]) -> None:
        self.group, self.more = group, more

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """verl's, with the entries over its own."""
        batch.extra_info.update(self.more)
        return self.group.update_actor(batch)


def check_chosen(config: DictConfig) -> None:
    """Raise ConfigError for what our estimator or policy loss would refuse at its first call."""
    estimator, mode = str(config.algorithm.adv_estimator), str(at(config, LOSS_MODE))
    with carried():
        if is_ours(estimator):
            chosen(node_of(config.algorithm), "advantage", named(estimator))
        if is_ours(mode):
            chosen(node_of(config.actor_rollout_ref.actor.policy_loss), "policy", named(mode))


def check_entries(config: ComposerConfig, vocabulary: int) -> None:
    """Raise ConfigError where the vocabulary has not as many entries, and one for the tail."""
    if config.hint_top_k is not None and config.hint_top_k >= vocabulary:
        raise ConfigError(
            f"{NODE}: hint_top_k is {config.hint_top_k}, and the vocabulary has {vocabulary} entries, of "
            "which one at least is the tail"
        )
