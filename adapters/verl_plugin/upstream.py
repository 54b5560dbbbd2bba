"""What this adapter assumes of verl: versions, names, config keys. Read this file first for a new release.

Tested with 0.6.1, 0.7.1 and 0.8.0 (the registries) and with 0.9.1 (the registries and composer_sync). verl is
imported inside the functions, so the doctor can read the names without it. The methods that override verl's
are in sync_trainer/trainer.py and sync_trainer/workers.py.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any, Literal, NamedTuple

from composer_plugins.config import at
from composer_plugins.errors import ConfigError, in_a_line

Release = tuple[int, int] | None  # major and minor; None: not known, and taken for the newest

# Releases: the first that accepts an estimator of ours; the first that loads entry points and has trainers
# of the v1 kind, to which composer_sync belongs; the first that nobody has tested.
FIRST, ENTRY_POINTS, UNTESTED = (0, 6), (0, 9), (0, 10)
DEFAULT_TRAINER = "sync"

# The methods of verl's PPOTrainerSync that composer_sync overrides.
OVERRIDDEN = {"_init_dataloader", "_init_resource_pool_mgr", "_compute_advantage", "_update_actor"}
OVERRIDDEN |= {"on_init_end", "trainer_mode"}

# How verl finds plugins.
MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
PLUGIN, ENTRY_POINT = "composer_plugins.adapters.verl_plugin.register", "composer"
TRAINER_MODULE = "composer_plugins.adapters.verl_plugin.sync_trainer.trainer"
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
    GROUP_SIZE = f"{ROLLOUT}.n"
    ESTIMATOR, CRITIC = "algorithm.adv_estimator", "critic.enable"
    POLICY_LOSS = f"{ACTOR}.policy_loss"
    LOSS_MODE, LOSS_TARGET = f"{POLICY_LOSS}.loss_mode", f"{POLICY_LOSS}._target_"
    AGG_MODE, SCALE_FACTOR = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    USE_KL_LOSS, KL_COEF, SHUFFLE = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.shuffle"
    KL_IN_REWARD = "algorithm.use_kl_in_reward"
    CORRECTION = "algorithm.rollout_correction"
    FILTER_GROUPS = "algorithm.filter_groups.enable"
    BYPASS, ROLLOUT_LOGPROBS = f"{CORRECTION}.bypass_mode", f"{ROLLOUT}.calculate_log_probs"
    FUSED_KERNELS, EXTERNAL_LIB = f"{MODEL}.use_fused_kernels", f"{MODEL}.external_lib"
    LORA = (f"{MODEL}.lora.rank", f"{MODEL}.lora_rank", f"{MODEL}.lora_adapter_path")
    USE_V1, TRAINER_OPTIONS, TRAINER_MODE = "trainer.use_v1", "trainer.v1", "trainer.v1.trainer_mode"
    PROJECT = "trainer.project_name"  # in every config that begins with verl's defaults
    TRAIN_FILES, VAL_FILES, DATASET_CLASS = "data.train_files", "data.val_files", "data.custom_cls.path"
    DISTILLATION, RAY_INIT = "distillation.enabled", "ray_kwargs.ray_init"
    TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
    DISTILLATION_LOSS = "distillation.distillation_loss.policy_loss_mode"


# Inputs of an estimator that verl's trainers compute for an estimator of their own only, and what to set.
NOT_SUPPLIED = {
    "baselines": (
        "verl samples the greedy baselines for its own estimator 'remax' only, in the legacy trainer",
        f"set {Key.ESTIMATOR}=remax {Key.USE_V1}=False, or {Key.ESTIMATOR}=composer/rloo",
    )
}
SHOWS_LOGITS = ("fsdp", "fsdp2")  # engines that pass a loss function the logits of the whole vocabulary
# Options of ACTOR and REF that cut each sequence into parts for so many ranks. The first is deprecated: verl
# copies a value above 1 to the second, which its FSDP engine reads.
ULYSSES = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
MEAN_OVER_ROWS = "geo_mean"  # a loss of verl's that counts every row of a micro-batch, empty ones too
BY_GEOMETRIC_MEAN = ("gmpo@verl",)  # weighs a row by the geometric mean of its rollout correction's weights
DEFAULT_MODE, NORM_MODE = "token-mean", "seq-mean-token-sum-norm"
MODES = (DEFAULT_MODE, "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM_MODE)
FORCED_MODES: dict[str, Any] = dict.fromkeys(("sapo@verl", "gmpo@verl"), "seq-mean-token-mean")  # always
# verl's own losses and estimators whose rows have another name than verl gives them.
NAMES_HERE: dict[str, dict[str, str]] = {
    "policy": {"vanilla": "grpo@verl", "gspo": "gspo_token@verl", "geo_mean": "gmpo@verl", "dro": "dro"},
    "advantage": {
        "grpo_vectorized": "grpo@verl",
        "rloo_vectorized": "rloo",
        "grpo_passk": "pass_at_k@verl",
        "reinforce_plus_plus": "reinforce_pp@verl",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline@verl",
    },
}
DEFAULT_DATA = "~/data/rlhf/"  # where the default values of Key.TRAIN_FILES and Key.VAL_FILES are


class Option(NamedTuple):
    """An option of verl's own losses or estimators, and what it sets in ours.

    A value equal to verl's default counts as not set, so that a loss keeps its own. Any other value acts, or
    it is an error (`rules.with_options`), or a warning where verl does not read it either.
    """

    key: str  # below OPTION_TABLES
    default: Any
    # The parameters that it sets, by their name in our losses; the first that a loss has counts. The tuple
    # has the losses for which the parameter means the same; () is every loss that has it.
    parameters: Mapping[str, tuple[str, ...]] = {}
    values: Mapping[Any, Any] = {}  # our value for verl's, where they differ
    fulfilled_by: tuple[str, ...] = ()  # losses that always do what a value other than the default asks for
    fallback: str = ""  # the option that verl reads where this one is null
    instead: str = ""  # what to set, if none of our losses has such a parameter
    without_effect: str = ""  # why verl does not read it either: a warning


_ABSENT: Any = object()
OPTION_TABLES = {"policy": Key.ACTOR, "advantage": "algorithm"}
WEIGHT_CAPPED = ("dppo_tv", "dppo_kl", "ipo", "minirl", "masked_is")  # whose ratio_cap bounds the weight
# verl logs the clip fractions of its geo_mean by the sign of the advantage, and those of sapo as 0.
CLIPPED_BY_SIGN, NEVER_CLIPPED = ("gmpo",), ("sapo",)
WITHOUT_STD = ("dr_grpo", "rloo", "opo", "gpg")
CLIP_COV, KL_COV = (f"set {Key.LOSS_MODE}={name}, verl's own loss" for name in ("clip_cov", "kl_cov"))
GDPO = f"set {Key.ESTIMATOR}=gdpo {Key.USE_V1}=False, verl's own estimator, which needs the legacy trainer"
# The options of verl's rollout correction that switch something on, with their values if not set. Those of
# OF_THE_LOSS act in verl's own loss bypass_mode only; use_policy_gradient is verl 0.6's loss_type.
OF_THE_LOSS = {"loss_type": "ppo_clip", "use_policy_gradient": False}
CORRECTIONS = {"rollout_is": None, "rollout_rs": None, **OF_THE_LOSS}


# Options that verl reads only beside another one: the option, its default, the other one, and the value that
# the other one needs; None is any value but null and False.
ONLY_WITH: tuple[tuple[str, Any, str, Any], ...] = (
    (Key.KL_COEF, 0.001, Key.USE_KL_LOSS, True),
    (f"{Key.ACTOR}.kl_loss_type", "low_var_kl", Key.USE_KL_LOSS, True),
    ("algorithm.kl_penalty", "kl", Key.KL_IN_REWARD, True),
    ("algorithm.kl_ctrl.type", "fixed", Key.KL_IN_REWARD, True),
    ("algorithm.kl_ctrl.kl_coef", 0.001, Key.KL_IN_REWARD, True),
    ("algorithm.kl_ctrl.horizon", 10000, "algorithm.kl_ctrl.type", "adaptive"),
    ("algorithm.kl_ctrl.target_kl", 0.1, "algorithm.kl_ctrl.type", "adaptive"),
    (f"{Key.CORRECTION}.rollout_is_threshold", 2.0, f"{Key.CORRECTION}.rollout_is", None),
    (f"{Key.CORRECTION}.rollout_is_batch_normalize", False, f"{Key.CORRECTION}.rollout_is", None),
    (f"{Key.CORRECTION}.rollout_rs_threshold", None, f"{Key.CORRECTION}.rollout_rs", None),
    (Key.SCALE_FACTOR, None, Key.AGG_MODE, NORM_MODE),
)
# verl's own estimators whose advantages differ within a response; those of BY_RETURN only where returns are
# discounted, or where each token has a reward.
BY_TOKEN, BY_RETURN = ("gae",), ("reinforce_plus_plus", "remax")


def clip(side: Literal["low", "high"]) -> Option:
    """Return verl's bound of the clip, which is the region's where the loss is DPPO's."""
    names = (f"clip_{side}", f"tv_{side}", f"kl_{side}")
    return Option(f"clip_ratio_{side}", 0.2, dict.fromkeys(names, ()), fallback="clip_ratio")


def of_bypass(name: str, default: Any, instead: str = "") -> Option:
    """Return an option of policy_loss.rollout_correction, which only verl's loss bypass_mode reads."""
    key = f"policy_loss.rollout_correction.{name}"
    return Option(key, default, instead=instead or f"set {Key.CORRECTION}.{name}")


# Every option that verl's own losses and estimators read and that acts only through ours. docs/verl.md shows
# this table, and a test compares it with verl's source.
OPTIONS: dict[str, tuple[Option, ...]] = {
    "policy": (
        clip("low"),
        clip("high"),
        Option(
            "clip_ratio",
            0.2,
            without_effect="verl reads it only where clip_ratio_low or clip_ratio_high is null",
            instead="set clip_ratio_low and clip_ratio_high",
        ),
        Option("clip_ratio_c", 3.0, {"dual_clip": (), "ratio_cap": WEIGHT_CAPPED}),
        Option("tau_pos", 1.0, {"tau_pos": ()}),
        Option("tau_neg", 1.05, {"tau_neg": ()}),
        Option("policy_loss.dro_beta", None, {"beta": ("dro",)}),
        Option("policy_loss.clip_cov_ratio", 0.0002, instead=CLIP_COV),
        Option("policy_loss.clip_cov_lb", 1.0, instead=CLIP_COV),
        Option("policy_loss.clip_cov_ub", 5.0, instead=CLIP_COV),
        Option("policy_loss.kl_cov_ratio", 0.0002, instead=KL_COV),
        Option("policy_loss.ppo_kl_coef", 0.1, instead=KL_COV),
        of_bypass("rollout_is", "sequence"),
        of_bypass("rollout_is_threshold", 2.0),
        of_bypass("rollout_is_batch_normalize", False),
        of_bypass("rollout_rs", None),
        of_bypass("rollout_rs_threshold", None),
        of_bypass("bypass_mode", False),
        of_bypass("loss_type", "ppo_clip", f"set {Key.LOSS_MODE}=bypass_mode, verl's own loss"),
    ),
    "advantage": (
        Option(
            "norm_adv_by_std_in_grpo",
            True,
            {"scale": ("grpo", "pass_at_k")},
            values={False: "none"},
            fulfilled_by=WITHOUT_STD,
        ),
        Option("gamma", 1.0, {"gamma": ()}),
        Option("lam", 1.0, {"lam": ()}, instead=f"set {Key.ESTIMATOR}=gae, verl's own estimator"),
        Option("gdpo_reward_keys", None, instead=GDPO),
        Option("gdpo_reward_weights", None, instead=GDPO),
        Option(
            "use_pf_ppo", False, instead=f"set {Key.ESTIMATOR}=gae, the only estimator with which it acts"
        ),
    ),
}

# The other options that verl's loss and advantage code reads. They act beside ours as beside verl's own:
# verl reads them outside of the functions in its registries, or this adapter reads them.
ACTING: dict[str, tuple[str, ...]] = {
    "policy": (
        *("loss_agg_mode", "loss_scale_factor", "global_batch_info", "policy_loss", "policy_loss.loss_mode"),
        *("entropy_coeff", "calculate_entropy", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
        *("ppo_mini_batch_size", "ppo_epochs", "shuffle", "data_loader_seed"),
        "policy_loss.rollout_correction",  # each of its options is in OPTIONS
    ),
    "advantage": (
        *("adv_estimator", "use_kl_in_reward", "kl_penalty", "rollout_correction"),
        *(f"kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")),
        # requirements.py reports those that have no effect with other options: CORRECTIONS
        *(f"rollout_correction.{name}" for name in ("rollout_is", "rollout_is_threshold", "bypass_mode")),
        *(f"rollout_correction.{name}" for name in ("rollout_rs", "rollout_rs_threshold", *OF_THE_LOSS)),
        "rollout_correction.rollout_is_batch_normalize",
        # of verl 0.6
        *(f"rollout_correction.rollout_{name}" for name in ("rs_threshold_lower", "token_veto_threshold")),
        "pf_ppo",  # with use_pf_ppo, which is in OPTIONS
    ),
}

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


def given_options(kind: str, table: Any) -> dict[str, Any]:
    """Return the keys of OPTIONS whose value in verl's config is not verl's default, with that value.

    `table` is the actor's config for a policy loss, and the algorithm's for an advantage. Where an option is
    null, the value of its fallback counts, as in verl.
    """
    found = {option.key: _value(table, option.key, option.default) for option in OPTIONS[kind]}
    read = {option.fallback for option in OPTIONS[kind] if option.fallback and found[option.key] is None}
    given = {}
    for option in OPTIONS[kind]:
        value = found[option.key]
        if value is None and option.fallback:
            value = found[option.fallback]
        if value != option.default and option.key not in read:
            given[option.key] = value
    return given


def _value(table: Any, path: str, default: Any) -> Any:
    """Return the entry at a dotted path, or the default where this verl has no such option."""
    for key in path.split("."):
        table = table.get(key, _ABSENT) if hasattr(table, "get") else _ABSENT
    return default if table is _ABSENT else table


def check_scale_factor(length: Any) -> None:
    """Raise ConfigError for a length that is not above 0: verl divides by it, also by a negative one."""
    if length is not None and (not isinstance(length, int | float) or not length > 0):
        raise ConfigError(Key.SCALE_FACTOR, f"it is {length!r}", "set a number above 0, or null")


def has_adapter(config: Any) -> bool:
    """Whether the actor is trained by LoRA: without its adapter it is then the reference policy."""
    return any(at(config, key) for key in Key.LORA)


def needs_reference(config: Any) -> bool:
    """Whether verl loads a reference policy."""
    return bool(at(config, Key.KL_IN_REWARD) or at(config, Key.USE_KL_LOSS))


def validation_error(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the key and the text of what verl's own `validate_config` raises; None if it raises nothing.

    main_ppo calls it before it starts Ray. The critic is left out, because its config loads the model. The
    key is the first one that the text names, or the table that is not such a dataclass, or the one that the
    line of verl's source names, or main_ppo.
    """
    from omegaconf import OmegaConf

    try:
        from verl.utils.config import validate_config
    except ImportError:  # an old verl beside other libraries than its own
        return None
    tree = OmegaConf.create(dict(config))
    OmegaConf.set_struct(tree, True)  # as hydra's: a key that is not there is an error
    try:
        validate_config(tree, needs_reference(config), use_critic=False)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        table = re.search(r"full_key: ([\w.]+)", str(error))
        line = traceback.extract_tb(cause.__traceback__)[-1].line or ""  # of verl, which reads an option
        named = _named_key(str(cause), config) or (table[1] if table else _named_key(line, config))
        return named or "main_ppo", in_a_line(cause)
    return None


def refused_values(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of what verl's own KL and rollout correction raise with this config.

    They are called on one row of two tokens. In a run, verl calls them for the first time after a rollout.
    """
    import torch
    from omegaconf import OmegaConf

    try:
        from verl import DataProto
        from verl.trainer.ppo import core_algos, rollout_corr_helper
    except ImportError:  # as in validation_error
        return
    numbers, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.long)
    fields = {"old_log_probs": numbers, "rollout_log_probs": numbers, "response_mask": mask}
    controller = "algorithm.kl_ctrl"
    kinds = {f"{Key.ACTOR}.kl_loss_type": Key.USE_KL_LOSS, "algorithm.kl_penalty": Key.KL_IN_REWARD}
    calls: dict[str, Callable[[Any], Any]] = {
        key: partial(core_algos.kl_penalty, numbers, numbers) for key, on in kinds.items() if at(config, on)
    }
    if at(config, Key.KL_IN_REWARD):
        calls[controller] = core_algos.get_kl_controller
    if at(config, Key.CORRECTION) and not at(config, Key.BYPASS):
        batch = DataProto.from_dict(tensors=fields)
        calls[Key.CORRECTION] = partial(
            rollout_corr_helper.compute_rollout_correction_and_add_to_batch, batch
        )
    for key, call in calls.items():
        value = at(config, key)
        table = {key: value} if isinstance(value, Mapping) else {}
        try:
            call(OmegaConf.create(dict(value)) if table else value)
        except Exception as error:
            yield _named_key(str(error), table) or key, in_a_line(error)


def _named_key(text: str, config: Mapping[str, Any]) -> str:
    """Return the first option of the config that a text names, in full or by its end; "" if it names none."""
    text = text.replace("config.", "")
    keys = list(options(config))
    for word in re.findall(r"\w+(?:\.\w+)+|\w+_\w+", text):
        found = [key for key in keys if f".{key}".endswith(f".{word}")]
        if len(found) == 1:
            return found[0]
    return ""


def options(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config's values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from options(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key)


def registries(*, trainers: bool = True) -> dict[str, list[str]]:
    """Return the names in verl's registries; none of a registry that this verl does not have."""
    found: dict[str, list[str]] = {}
    for kind, (module, name) in REGISTRIES.items():
        if kind == "trainers" and not trainers:
            found[kind] = []
            continue
        try:
            found[kind] = sorted(getattr(import_module(module), name))
        except Exception:  # verl before 0.9 has no v1, and v1 needs TransferQueue
            found[kind] = []
    return found


def postpone_trainer() -> None:
    """Let the doctor's `import verl` register composer_sync without loading it, which takes seconds.

    The module is executed when a name in it is asked for: `load_trainer`.
    """
    spec = find_spec(TRAINER_MODULE)
    assert spec is not None and spec.loader is not None
    loader, module = spec.loader, module_from_spec(spec)

    def load(name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by inspect for example
            raise AttributeError(name)
        del module.__getattr__
        loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = load  # type: ignore[method-assign]
    sys.modules[TRAINER_MODULE] = module


def load_trainer() -> str:
    """Register composer_sync where this verl has trainers of its kind, and return why it fails; "" if not."""
    try:
        if has_v1_trainers():
            assert import_module(TRAINER_MODULE).ComposerTrainer  # executes a postponed module
    except Exception as error:
        return in_a_line(error)
    return ""


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
    """Return the rows of a mini-batch over all ranks, and those of a micro-batch (dynamic: any number)."""
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
    """Return ppo_max_token_len_per_gpu and its like, for each model that scores a sequence of ours."""
    models, limits = config.actor_rollout_ref, []
    if models.actor.use_dynamic_bsz:
        limits = [models.actor.ppo_max_token_len_per_gpu, models.rollout.log_prob_max_token_len_per_gpu]
    if own_reference and models.ref.log_prob_use_dynamic_bsz:
        limits.append(models.ref.log_prob_max_token_len_per_gpu)
    return limits
