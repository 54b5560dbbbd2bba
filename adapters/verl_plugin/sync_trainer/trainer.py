"""`trainer.v1.trainer_mode: composer_sync`: verl's synchronous trainer with the hint and replay channels.

verl's own steps stay as they are. After the advantages the teacher scores the responses. Before the update
the replayed rows are added to the batch. The actor's loss function is ours, which calls verl's. With both
weights 0 none of this happens, and the run is the same as with verl's own trainer.
"""

import sys
from typing import Any

import ray
import transfer_queue
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.utils.profiler import marked_timer

from composer_plugins.adapters.verl_plugin import options as verl_options
from composer_plugins.adapters.verl_plugin.sync_trainer.batch_layout import add_replayed_rows
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, findings
from composer_plugins.adapters.verl_plugin.sync_trainer.dataset import check_rows
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import TAID_T
from composer_plugins.adapters.verl_plugin.sync_trainer.health import measure_step
from composer_plugins.adapters.verl_plugin.sync_trainer.hint import add_teacher_logprobs
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import HINT, sums_to_means
from composer_plugins.adapters.verl_plugin.sync_trainer.replay import Replayed, replayed_rows
from composer_plugins.adapters.verl_plugin.sync_trainer.workers import TopKLogprobsWorker
from composer_plugins.adapters.verl_plugin.upstream import SHOW_LOGITS, registries
from composer_plugins.config import at
from composer_plugins.errors import enforce
from composer_plugins.frameworks.verl import Key
from composer_plugins.health.watch import Health

MODELS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


class ComposerTrainer(PPOTrainerSync):
    """verl's PPOTrainerSync with the hint and replay channels of `algorithm.composer`.

    Raises ConfigError for the first error in `checks.findings`, before a worker is started.
    """

    # verl compares the name of the mode with "sync" where it decides how to sample.
    trainer_mode = property(lambda self: "sync", lambda self, name: None)

    def __init__(self, config: DictConfig) -> None:
        import_external_libs(at(config, Key.EXTERNAL_LIB))  # they may register names
        tree: Any = OmegaConf.to_container(config, resolve=True)
        enforce(findings(Run(tree), registries()))
        self.inputs = Run(tree).inputs
        self.config = config
        self.channels = verl_options.channels_of_node(verl_options.node_of(config.algorithm))
        self.policy_only = not (self.channels.hint or self.channels.replay)
        self.sets_loss = bool(self.inputs) or not self.policy_only
        self.health = Health(on=self.channels.config.health)
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if not self.policy_only:
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model).hf_config.get_text_config()
            self.positions = getattr(model, "max_position_embeddings", sys.maxsize)
            self.columns = check_rows(self)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.channels.compares_distributions:
            for role in self.role_worker_mapping.keys() & MODELS:
                self.role_worker_mapping[role] = ray.remote(TopKLogprobsWorker)

    def on_init_end(self) -> None:
        """Set the actor's loss function, after verl's own initialisation."""
        super().on_init_end()
        if self.sets_loss:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            node = verl_options.node_of(self.config.algorithm)
            self.actor_rollout_wg.set_loss_fn(ComposerLoss(actor, node, self.inputs))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with verl_options.under_composer_sync(batch.keys):
            batch = super()._compute_advantage(batch, metrics)
        if self.health.on:
            measure_step(self.health, batch, metrics)
        if not self.channels.hint:
            return batch
        with marked_timer("composer_teacher", self.timing_raw):
            return add_teacher_logprobs(self, batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.sets_loss:
            return super()._update_actor(batch, metrics)
        extra_info: dict[str, Any] = {SHOW_LOGITS: True} if self.channels.compares_distributions else {}
        if self.channels.config.hint_t_start is not None:
            extra_info[TAID_T] = metrics[f"{HINT}t"] = self.taid_t()
        rows, whole, keys = list[Replayed](), batch, list[str]()
        if self.channels.replay:
            with marked_timer("composer_pairs", self.timing_raw):
                rows = replayed_rows(self, batch, metrics)
        if rows:
            whole, keys, extra_info["mini_batch_size"] = add_replayed_rows(self, batch, rows)
        group: Any = self.actor_rollout_wg
        self.actor_rollout_wg: Any = WorkerGroupWithExtraInfo(group, extra_info)
        try:
            super()._update_actor(whole, metrics)
            sums_to_means(metrics)
        finally:
            self.actor_rollout_wg = group
            if keys:
                transfer_queue.kv_clear(keys=keys, partition_id=batch.partition_id)
        return batch

    def taid_t(self) -> float:
        """Return TAID's t of this step: linear from hint_t_start, at the first step, to hint_params.t.

        It depends on the step only, so a resumed run continues with it. The paper's adaptive schedule, which
        is faster while the loss falls, would need a state in the checkpoint.
        """
        assert self.channels.hint is not None and self.channels.config.hint_t_start is not None
        start, end = self.channels.config.hint_t_start, self.channels.hint.value("t")
        progress = (self.global_steps - 1) / max(1, self.total_training_steps - 1)
        return float(start + (end - start) * min(1.0, progress))


class WorkerGroupWithExtraInfo:
    """A worker group whose `update_actor` adds entries to the extra_info that verl's trainer sets."""

    def __init__(self, group: Any, extra_info: dict[str, Any]) -> None:
        self.group, self.extra_info = group, extra_info

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """Call verl's `update_actor` with these entries in place of its own."""
        batch.extra_info.update(self.extra_info)
        return self.group.update_actor(batch)
