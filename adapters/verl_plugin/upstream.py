"""What this adapter assumes of verl: versions, names, config keys. Read this file first for a new release.

Tested with 0.6.1, 0.7.1 and 0.8.0 (the registries) and with 0.9.1 (the registries and composer_sync). verl is
imported inside the functions, so the doctor can read the names without it. The methods that override verl's
are in sync_trainer/trainer.py and sync_trainer/workers.py.
"""

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from composer_plugins.errors import ConfigError

Release = tuple[int, int] | None  # major and minor; None: not known, and taken for the newest

# Releases: the first that accepts an estimator of ours; the first that loads entry points and has trainers
# of the v1 kind, to which composer_sync belongs; the first that nobody has tested.
FIRST, ENTRY_POINTS, UNTESTED = (0, 6), (0, 9), (0, 10)

# The methods of verl's PPOTrainerSync that composer_sync overrides.
OVERRIDDEN = {"_init_dataloader", "_init_resource_pool_mgr", "_compute_advantage", "_update_actor"}
OVERRIDDEN |= {"on_init_end", "trainer_mode"}

# How verl finds plugins.
MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
PLUGIN, ENTRY_POINT = "composer_plugins.adapters.verl_plugin.register", "composer"
REGISTRIES = {
    "estimators": ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
    "losses": ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
    "trainers": ("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
}
IMPORTS_TRL = "verl.models.transformers.monkey_patch"  # the FSDP engine's import of TRL, if installed


class Key:
    """The keys of verl's config that this adapter reads or names in a message."""

    ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    ESTIMATOR, CRITIC = "algorithm.adv_estimator", "critic.enable"
    POLICY_LOSS = f"{ACTOR}.policy_loss"
    LOSS_MODE, LOSS_TARGET = f"{POLICY_LOSS}.loss_mode", f"{POLICY_LOSS}._target_"
    AGG_MODE, SCALE_FACTOR = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    USE_KL_LOSS, KL_COEF, SHUFFLE = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.shuffle"
    KL_IN_REWARD = "algorithm.use_kl_in_reward"
    BYPASS, ROLLOUT_LOGPROBS = "algorithm.rollout_correction.bypass_mode", f"{ROLLOUT}.calculate_log_probs"
    FUSED_KERNELS, EXTERNAL_LIB = f"{MODEL}.use_fused_kernels", f"{MODEL}.external_lib"
    LORA = (f"{MODEL}.lora.rank", f"{MODEL}.lora_rank", f"{MODEL}.lora_adapter_path")
    USE_V1, TRAINER_OPTIONS, TRAINER_MODE = "trainer.use_v1", "trainer.v1", "trainer.v1.trainer_mode"
    PROJECT = "trainer.project_name"  # in every config that begins with verl's defaults
    TRAIN_FILES, DATASET_CLASS = "data.train_files", "data.custom_cls.path"
    DISTILLATION, RAY_INIT = "distillation.enabled", "ray_kwargs.ray_init"


SHOWS_LOGITS = ("fsdp", "fsdp2")  # engines that pass a loss function the logits of the whole vocabulary
MEAN_OVER_ROWS = "geo_mean"  # a loss of verl's that counts every row of a micro-batch, empty ones too
DEFAULT_MODE, NORM_MODE = "token-mean", "seq-mean-token-sum-norm"
MODES = (DEFAULT_MODE, "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM_MODE)
FORCED_MODES: dict[str, Any] = {"sapo@verl": "seq-mean-token-mean"}  # whatever loss_agg_mode is

# Fields of a batch, and entries of a call to a worker.
SHOW_LOGITS = "distillation_use_topk"  # calls the loss function with the logits first
PADDING_UID = "pad"  # the uid of a padding row of verl's begins with this
ROUTES = "routed_experts"
# Fields with a number per response token.
RESPONSE_FIELDS = {"advantages", "entropy", "old_log_probs", "ref_log_prob", "returns", "rm_scores"}
RESPONSE_FIELDS |= {"rollout_is_weights", "rollout_log_probs", "token_level_rewards", "values"}


def release_of(version: str | None) -> Release:
    """Return major and minor of a version; None if there is none."""
    if version is None:
        return None
    if (found := re.match(r"v?(\d+)\.(\d+)", version)) is None:
        raise ConfigError("--version", f"{version!r} is not a version", "write it as 0.9.1 or 0.8")
    return int(found[1]), int(found[2])


def at_least(release: Release, wanted: tuple[int, int]) -> bool:
    """Whether verl is at least as new; where none is installed, the newest is assumed."""
    return release is None or release >= wanted


def at(tree: Any, path: str) -> Any:
    """Return the entry at a dotted path of a config, a DictConfig or a mapping; None where there is none."""
    for key in path.split("."):
        tree = tree.get(key) if hasattr(tree, "get") else None
    return tree


def has_adapter(config: Any) -> bool:
    """Whether the actor is trained by LoRA: without its adapter it is then the reference policy."""
    return any(at(config, key) for key in Key.LORA)


def registries() -> dict[str, list[str]]:
    """Return the names in verl's registries; none of a registry that this verl does not have."""
    found: dict[str, list[str]] = {}
    for kind, (module, name) in REGISTRIES.items():
        try:
            found[kind] = sorted(getattr(import_module(module), name))
        except Exception:  # verl before 0.9 has no v1, and v1 needs TransferQueue
            found[kind] = []
    return found


def has_v1_trainers() -> bool:
    """Whether this verl has trainers of the v1 kind, and the TransferQueue that they import."""
    return bool(find_spec("transfer_queue") and find_spec("verl.trainer.ppo.v1"))


@cache
def norm_mode_is_a_sum() -> bool:
    """Whether this verl divides NORM_MODE neither by sequences nor by ranks: before 0.7.1."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    ones = torch.ones(2, 1)
    return float(agg_loss(ones, ones, NORM_MODE)) == 2.0


def data_parallel_size(worker_group: Any) -> int:
    """Return how many ranks share the rows. verl knows it from the workers once it has balanced a batch."""
    return max(worker_group._dispatch_info["actor"]) + 1


def mini_and_micro_batch(config: Any) -> tuple[int, int]:
    """Return the rows of a mini-batch over all ranks, and those of a micro-batch (dynamic: any number)."""
    actor = config.actor_rollout_ref.actor
    micro = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    return actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n, micro


def scoring_micro_batch(config: Any, *, own_reference: bool) -> int:
    """Return the rows of a micro-batch when log-probabilities are computed (dynamic: any number)."""
    owner = config.actor_rollout_ref.ref if own_reference else config.actor_rollout_ref.rollout
    return 1 if owner.log_prob_use_dynamic_bsz else owner.log_prob_micro_batch_size_per_gpu


def token_limits(config: Any, *, own_reference: bool) -> list[int]:
    """Return ppo_max_token_len_per_gpu and its like, for each model that scores a sequence of ours."""
    models, limits = config.actor_rollout_ref, []
    if models.actor.use_dynamic_bsz:
        limits = [models.actor.ppo_max_token_len_per_gpu, models.rollout.log_prob_max_token_len_per_gpu]
    if own_reference and models.ref.log_prob_use_dynamic_bsz:
        limits.append(models.ref.log_prob_max_token_len_per_gpu)
    return limits
