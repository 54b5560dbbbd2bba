"""What this adapter assumes of verl's code: versions and names. Read this file first for a new release.

Tested with 0.8.0 (the registries) and with 0.9.1 (the registries and composer_sync). verl is
imported inside the functions, so the doctor can read the names without it. What verl's options are is in
composer_plugins/frameworks/verl.py. sync_trainer/trainer.py overrides `_init_dataloader`, `on_init_end`,
`_init_resource_pool_mgr`, `_compute_advantage` and `_update_actor`, and workers.py there `infer_batch`.
"""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from composer_plugins.config import ABSENT, at
from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.frameworks.contract import Option
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.losses.row import Kind

Release = tuple[int, int] | None  # major and minor; None: not known, and taken for the newest

FIRST, UNTESTED = (0, 8), (0, 10)  # the first release that is supported, and the first that nobody has tested
DEFAULT_TRAINER = "sync"

# How verl finds plugins, in addition to the entry point of 0.9.
MODULES, PLUGIN = "VERL_USE_EXTERNAL_MODULES", "composer_plugins.adapters.verl_plugin.register"
DEFERRED_TRAINER = "composer_plugins.adapters.verl_plugin.deferred_trainer"
TRAINER_MODULE = "composer_plugins.adapters.verl_plugin.sync_trainer.trainer"
REGISTRIES = {"estimators": "ADV_ESTIMATOR_REGISTRY", "losses": "POLICY_LOSS_REGISTRY"}  # of core_algos
# The classes of the configs that a loss and an estimator get, with the defaults of verl's options.
CONFIGS: dict[Kind, tuple[str, str]] = {
    "policy": ("verl.workers.config", "ActorConfig"),
    "advantage": ("verl.trainer.config", "AlgoConfig"),
}

# Fields of a batch, and entries of a call to a worker.
SHOW_LOGITS = "distillation_use_topk"  # calls the loss function with the logits first
PADDING_UID = "pad"  # the uid of a padding row of verl's begins with this
ROUTES = "routed_experts"
# Fields with a number per response token.
RESPONSE_FIELDS = {"advantages", "entropy", "old_log_probs", "ref_log_prob", "returns", "rm_scores"}
RESPONSE_FIELDS |= {"rollout_is_weights", "rollout_log_probs", "token_level_rewards", "values"}


def release_of(version: str | None) -> Release:
    """Return major and minor of a version, or None without a version. An unsupported one is a ConfigError."""
    if version is None:
        return None
    if (found := re.match(r"v?(\d+)\.(\d+)", version)) is None:
        raise ConfigError("--version", f"{version!r} is not a version", "write it as 0.9.1 or 0.8")
    release = int(found[1]), int(found[2])
    if release < FIRST:
        problem = f"it is verl {version}, and composer-plugins runs in verl 0.8 and 0.9"
        raise ConfigError("verl", problem, "install it: pip install 'verl>=0.8,<0.10'")
    return release


def check_release() -> None:
    """Raise ConfigError if the installed verl is too old."""
    from verl import __version__

    release_of(__version__)


def moved(kind: Kind, table: Any) -> dict[str, Any]:
    """Return verl's options of its own losses that are not at the default of the config's class, by key.

    `table` is the actor's config for a policy loss, and the algorithm's for an advantage. Where it is not of
    a class, the class that is loaded counts, or else our table. Where verl reads a second option in place of
    one that is null, that value counts.
    """
    module, name = CONFIGS[kind]
    config = type(table) if is_dataclass(table) else getattr(sys.modules.get(module), name, None)
    found = dict[str, Any]()
    for option in VERL.options_of(kind):
        value = _entry(table, option.key)
        if value is None and option.fallback:
            value = _entry(table, option.fallback)
        if option.acts_by_parameters and value is not ABSENT and value != _default(config, option):
            found[option.key] = value
    return found


def _entry(table: Any, path: str) -> Any:
    """Return an entry of verl's config, whose dataclasses are mappings that raise AttributeError in 0.8."""
    for name in path.split("."):
        table = table.get(name, ABSENT) if hasattr(table, "get") else ABSENT
    return table


def _default(config: Any, option: Option) -> Any:
    """Return the default of an option in a class of verl's config; our table's where it has none there."""
    for name in option.key.split("."):
        if (one := getattr(config, "__dataclass_fields__", {}).get(name)) is None:
            return option.default
        config = one.default_factory() if one.default_factory is not MISSING else one.default
    return config


def has_adapter(config: Any) -> bool:
    """Whether the actor is trained by LoRA: without its adapter it is then the reference policy."""
    return any(at(config, key) for key in Key.LORA)


def needs_reference(config: Any) -> bool:
    """Whether verl loads a reference policy."""
    return bool(at(config, Key.KL_IN_REWARD) or at(config, Key.USE_KL_LOSS))


def validation_error(config: Mapping[str, Any]) -> str:
    """Return what verl's own `validate_config` raises; "" if it raises nothing.

    main_ppo calls it before it starts Ray. The critic is left out, because its config loads the model.
    """
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    tree = OmegaConf.create(dict(config))
    OmegaConf.set_struct(tree, True)  # as hydra's: a key that is not there is an error
    try:
        validate_config(tree, needs_reference(config), use_critic=False)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return in_a_line(cause)
    return ""


def registry(kind: str) -> dict[str, Any]:
    """Return one of verl's registries: a function by its name."""
    found: dict[str, Any] = getattr(import_module("verl.trainer.ppo.core_algos"), REGISTRIES[kind])
    return found


def registries() -> dict[str, list[str]]:
    """Return the names in verl's registries; none where its module does not import, which the plugin says."""
    found: dict[str, list[str]] = {kind: [] for kind in REGISTRIES}
    with suppress(Exception):
        found |= {kind: sorted(registry(kind)) for kind in REGISTRIES}
    return found


def trainer_failure() -> str:
    """Return why the trainer composer_sync cannot be loaded, where this verl has its kind; "" if it can."""
    try:
        if has_v1_trainers():
            import_module(TRAINER_MODULE)
    except Exception as error:
        return in_a_line(error)
    return ""


def has_v1_trainers() -> bool:
    """Whether this verl has trainers of the v1 kind, and the TransferQueue that they import."""
    return bool(find_spec("transfer_queue") and find_spec("verl.trainer.ppo.v1"))


def whole_logits(logits: Any) -> Any:
    """Return the tensor that gets the gradient of verl's log-probabilities; None if it has other entries too.

    verl's engine computes the log-probabilities of a tensor, and shows a loss function a view of it.
    """
    whole = logits if logits._base is None else logits._base
    same = whole.numel() == logits.numel() and whole.is_contiguous() and logits.is_contiguous()
    return whole if same else None


def data_parallel_size(worker_group: Any) -> int:
    """Return how many ranks share the rows. verl knows it from the workers once it has balanced a batch."""
    return max(worker_group._dispatch_info["actor"]) + 1


def mini_and_micro_batch(config: Any) -> tuple[int, int]:
    """Return the rows of a mini-batch over all ranks, and the rows of a micro-batch (dynamic: any number)."""
    actor = config.actor_rollout_ref.actor
    micro = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    return actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n, micro


def beside(algorithm: Any, key: str) -> Any:
    """Return an entry of the config to which the table `algorithm` belongs; None where it is alone."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(algorithm) or algorithm._get_parent() is None:
        return None
    return OmegaConf.select(algorithm, f"..{key}")


def scoring_micro_batch(config: Any, *, own_reference: bool) -> int:
    """Return the rows of a micro-batch when log-probabilities are computed (dynamic: any number)."""
    owner = config.actor_rollout_ref.ref if own_reference else config.actor_rollout_ref.rollout
    return 1 if owner.log_prob_use_dynamic_bsz else owner.log_prob_micro_batch_size_per_gpu


def token_limits(config: Any, *, own_reference: bool) -> list[int]:
    """Return ppo_max_token_len_per_gpu and its like, for each model that scores one of our sequences."""
    models, limits = config.actor_rollout_ref, []
    if models.actor.use_dynamic_bsz:
        limits = [models.actor.ppo_max_token_len_per_gpu, models.rollout.log_prob_max_token_len_per_gpu]
    if own_reference and models.ref.log_prob_use_dynamic_bsz:
        limits.append(models.ref.log_prob_max_token_len_per_gpu)
    return limits
