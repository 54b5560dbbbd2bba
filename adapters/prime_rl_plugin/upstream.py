"""What this adapter relies on in PRIME-RL and verifiers: versions, fields, names of losses and algorithms.

To port the adapter to another release, begin here. Neither package is imported: their objects are read by the
fields below. The options of the user's TOML are read in `doctor/`.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from composer_plugins.errors import ConfigError, DataError

if TYPE_CHECKING:  # the doctor loads no torch
    from torch import Tensor

# --- Releases ------------------------------------------------------------------------------------------


class Generation(NamedTuple):
    """Successive releases of PRIME-RL that call a custom loss in the same way."""

    since: str
    until: str  # the first release after it; "" for the newest
    denominator: str  # what the trainer divides the sum of a custom loss by
    hint: str  # what fills the reference log-probabilities beside RL; "" if nothing does
    replay: str  # what fills the weights; "" if nothing does


TEACHER, ECHO, NODE = "orchestrator.teacher_model", "echo filter", "verifiers node"
MICRO_BATCHES = "the number of micro-batches"
OWN_TOKENS, GLOBAL_TOKENS = "this rank's tokens", "the tokens of the global batch"

GENERATIONS = (
    Generation("0.4", "0.5", MICRO_BATCHES, TEACHER, ""),
    Generation("0.5", "0.6", OWN_TOKENS, TEACHER, ""),
    Generation("0.6", "0.7", GLOBAL_TOKENS, "", ""),  # a teacher and RL exclude each other in one run
    Generation("0.7", "0.8.1.dev52", GLOBAL_TOKENS, ECHO, ECHO),
    Generation("0.8.1.dev52", "", GLOBAL_TOKENS, NODE, NODE),
)
NEWEST = GENERATIONS[-1]
# Since #3418 of 27 August 2026, known from source text only. Its denominator is the sum of the weights of all
# tokens. Those of a pair, +c and -c, cancel in it.
AFTER_559B447 = Generation("after 559b447", "", GLOBAL_TOKENS, NODE, "")
NEWEST_TESTED = "0.8.1.dev67"  # the tag of commit 559b447
# The first release with SAMPLE_FIELDS, and the first verifiers with NODE_FIELDS.
SAMPLES_SINCE, VERIFIERS_SINCE = "0.7", "commit 4bcb48e55 of August 2026"

MODE = "token-mean"  # how the trainer reduces; since 0.6 over the whole batch
# What its own losses report, here under the same names.
METRICS = frozenset({"mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl"})
METRICS |= {"is_masked", "is_masked_low", "is_masked_high"}
DISTRIBUTION = "prime-rl"
NEWEST_OPTION = "filter_zero_advantages"  # of the orchestrator
# Files of PRIME-RL's package, and strings in them that tell its generation; the newest first. Its metadata do
# not: tag v0.4.0 says 0.1.0 there, v0.5.0 says 0.4.0, and everything after v0.8.0 says 0.8.0.
LOSS = "trainer/rl/loss.py"
FEATURES: tuple[tuple[Generation, str, str, bool], ...] = (  # whether the file has the string, or has it not
    (AFTER_559B447, LOSS, "default_loss_fn", False),
    (NEWEST, "orchestrator/trajectories.py", "loss_weights", True),
    (GENERATIONS[3], LOSS, "def setup_rl_loss_fn", True),
    (GENERATIONS[2], LOSS, "def setup_loss_fns", True),
    (GENERATIONS[1], "configs/trainer.py", "class SFTLossConfig", True),
    (GENERATIONS[0], LOSS, "def setup_loss_fn", True),
)
# Names in its module LOSS before 0.7 that tell the generation; a module without any is that of 0.5.
LOSS_NAMES = ((GENERATIONS[2], "setup_loss_fns"), (GENERATIONS[0], "LossConfigType"))
# What `doctor/probe.py` is given to find the installed release: distribution, package, files and strings.
INSTALLATION = (DISTRIBUTION, "prime_rl", [(file, word) for _, file, word, _ in FEATURES])


def installed() -> str | None:
    """PRIME-RL's version in this environment, without importing it."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def generation_of(release: str | None) -> Generation:
    """The generation of a release by its number; the newest tested one if the release is not known."""
    if release is None or release == "559b447":
        return NEWEST
    if release.upper() == "HEAD":
        return AFTER_559B447
    number = _number(release)
    if number < _number(GENERATIONS[0].since):
        problem = f"PRIME-RL {release} takes no custom loss"
        raise ConfigError("--version", problem, "upgrade PRIME-RL to 0.5 or later, or name another version")
    if number > _number(NEWEST_TESTED):
        return AFTER_559B447
    return [one for one in GENERATIONS if _number(one.since) <= number][-1]


def generation_by_features(found: Sequence[bool | None]) -> Generation | None:
    """The generation whose strings the probe found in the source; None if there is no source.

    `found` says for each of `FEATURES` whether the file has the string, and None for an absent file.
    """
    for (generation, _, _, is_there), has in zip(FEATURES, found, strict=True):
        if has is is_there:
            return generation
    return None


def _number(release: str) -> tuple[float, ...]:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?dev(\d+))?", release)
    if found is None:
        raise ConfigError(
            "--version", f"{release!r} is not a version", "write 0.8.0, 0.8.1.dev52, 559b447 or HEAD"
        )
    major, minor, patch, dev = found.groups()
    return int(major), int(minor), int(patch or 0), float(dev or "inf") if patch else 0.0


# --- What the loss is called with ----------------------------------------------------------------------


class Streams(NamedTuple):
    """PRIME-RL's LossInputs under the catalogue's names: one packed sequence, [tokens] each."""

    logprobs: "Tensor"
    rollout_logprobs: "Tensor"
    advantages: "Tensor"
    mask: "Tensor"
    reference: "Tensor | None"
    weights: "Tensor | None"
    # [tokens, entries] each: the policy's and the rollout engine's, of every entry in the sampler's mask
    support: "tuple[Tensor, Tensor] | None"


STREAMS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
REFERENCES = ("ref_logprobs", "teacher_logprobs")  # the second one before 0.7
WEIGHTS = "loss_weights"
SUPPORTS = ("trainer_mask_logprobs", "inference_mask_logprobs")  # after 559b447
SUPPORT_OPTION = "enable_return_sampling_mask_logprobs"  # of [inference]; truncated sampling has such a mask


def streams(inputs: Any) -> Streams:
    """The fields of LossInputs; DataError if one is absent that every release has."""
    given: list[Any] = [getattr(inputs, name, None) for name in STREAMS]
    if absent := [name for name, x in zip(STREAMS, given, strict=True) if x is None]:
        remedy = "point import_path at a function that PRIME-RL calls with its LossInputs"
        raise DataError("LossInputs", f"there is no {' and no '.join(absent)}", remedy)
    reference = next((getattr(inputs, name) for name in REFERENCES if hasattr(inputs, name)), None)
    logprobs, rollout_logprobs, advantages, mask = given
    weights = getattr(inputs, WEIGHTS, None)
    policy, rollout = (getattr(inputs, name, None) for name in SUPPORTS)
    support = None if policy is None or rollout is None else (policy, rollout)
    return Streams(logprobs, rollout_logprobs, advantages, mask, reference, weights, support)


def check_streams(inputs: Any, found: Streams, *, needs_reference: bool) -> None:
    """Raise DataError for a wrong type or shape. Values are not checked: that would wait for the device."""
    import torch

    if needs_reference and not any(hasattr(inputs, name) for name in REFERENCES):
        problem = f"there is no {' and no '.join(REFERENCES)}, which a hint needs"
        raise DataError("LossInputs", problem, "remove the hint: this PRIME-RL cannot carry it")
    names, mask = (*STREAMS, REFERENCES[0], WEIGHTS), found.mask
    given = {name: x for name, x in zip(names, found[:-1], strict=True) if x is not None}
    given |= dict(zip(SUPPORTS, found.support or (), strict=False))
    for name, x in given.items():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        if x is mask and kind is not torch.bool:
            raise DataError(name, f"it is {kind}", "pass a tensor of booleans")
        if x is not mask and not getattr(kind, "is_floating_point", False):
            raise DataError(name, f"it is {kind}", "pass a tensor of floating point")
    for name, x in given.items():
        shape = x.shape[:1] if name in SUPPORTS and x.dim() == 2 else x.shape
        if shape != mask.shape or mask.dim() != 1 or not mask.numel():
            problem = f"its shape is {tuple(x.shape)}, and that of loss_mask {tuple(mask.shape)}"
            raise DataError(name, problem, "pass [tokens] for both, one packed sequence")


def generation_of_inputs(inputs: Any, release: str | None) -> Generation:
    """The generation of the PRIME-RL that made these LossInputs, by their fields and the names of its module.

    Its `release` is used only for inputs of which no module of PRIME-RL is known.
    """
    module = sys.modules.get(type(inputs).__module__)
    names = vars(module) if module is not None and "LossInputs" in vars(module) else {}
    # The divisor became the sum of the weights before LossInputs got this field, and after #3418 had deleted
    # the function.
    if hasattr(inputs, SUPPORTS[0]) or (names and "default_loss_fn" not in names):
        return AFTER_559B447
    if hasattr(inputs, WEIGHTS):
        return NEWEST
    if names:
        return next((one for one, name in LOSS_NAMES if name in names), GENERATIONS[1])
    return GENERATIONS[2] if (release or "").startswith("0.6") else GENERATIONS[1]


# --- verifiers' nodes, and PRIME-RL's samples ----------------------------------------------------------


class Node(Protocol):
    """A message of verifiers. `sampled_count` checks that it has the last two fields, which are newer."""

    sampled: bool
    token_ids: list[int]
    mask: list[bool]  # True at the tokens that the policy sampled
    logprobs: list[float]  # one per sampled token
    reference_logprobs: list[float] | None  # one per sampled token
    loss_weights: dict[str, list[float]] | None  # one per token, by the name of PRIME-RL's loss


NODE_FIELDS = ("reference_logprobs", "loss_weights")
SAMPLE_FIELDS = ("ref_logprobs", "rl_weights")
POLICY_STREAM = "rl"  # the weights of the custom loss; a node may carry those of PRIME-RL's other losses too


def weights(node: Node) -> list[float] | None:
    """The weights of the custom loss that the node carries, one per token."""
    return (node.loss_weights or {}).get(POLICY_STREAM)


def set_weights(node: Node, per_sampled: Sequence[float]) -> None:
    """Give the node one weight per sampled token, beside the weights of PRIME-RL's other losses."""
    left = iter(per_sampled)
    own = [next(left) if sampled else 0.0 for sampled in node.mask]
    node.loss_weights = (node.loss_weights or {}) | {POLICY_STREAM: own}


def check_node_type(node_type: type) -> None:
    """ConfigError unless nodes of this type, `verifiers.v1.graph.MessageNode`, can carry a stamp.

    Call it where an environment is built: an old verifiers is then found before the first rollout.
    """
    fields = getattr(node_type, "model_fields", None) or getattr(node_type, "__dataclass_fields__", {})
    if absent := [name for name in NODE_FIELDS if name not in fields]:
        raise ConfigError(
            node_type.__name__,
            f"there is no {' and no '.join(absent)}, which verifiers has since {VERIFIERS_SINCE}, and which "
            f"PRIME-RL passes on since {NEWEST.since}",
            "upgrade, or with PRIME-RL 0.7 and 0.8 use stored_stamps.echo_filter",
        )


def sampled_count(node: Node) -> int:
    """How many of the node's tokens the policy sampled; an error if the node cannot be stamped."""
    check_node_type(type(node))
    if len(node.mask) != len(node.token_ids):
        problem = f"has {len(node.token_ids)} tokens and a mask of {len(node.mask)}"
        raise DataError("node", problem, "give one boolean per token")
    count = sum(node.mask)
    if not (node.sampled and count):
        raise DataError(
            "node", "the policy did not sample it, so it is not trained", "stamp completions only"
        )
    return count


def is_trained(node: Node) -> bool:
    """Whether PRIME-RL trains any token of this node."""
    return node.sampled and any(node.mask)


def trained_branches(trace: Any) -> Iterator[tuple[Any, list[Node]]]:
    """Each branch with nodes to train, and these nodes. A node in two branches is trained in the first one.

    `trace` is a verifiers trace, or a rollout of PRIME-RL 0.7 and 0.8.
    """
    if not hasattr(trace, "branches"):
        problem = f"it is of type {type(trace).__name__}, which has no branches"
        raise DataError("trace", problem, "pass verifiers' trace, or a rollout of PRIME-RL")
    seen: set[int] = set()
    for branch in trace.branches:
        trained = [node for node in branch.nodes if is_trained(node) and id(node) not in seen]
        seen |= {id(node) for node in trained}
        if trained:
            yield branch, trained


def samples(rollout: Any) -> list[Any] | None:
    """The samples of a rollout of PRIME-RL 0.7 and 0.8, checked; None for a later one, which has nodes."""
    found = getattr(rollout, "samples", None)
    for sample in found or ():
        if absent := [name for name in SAMPLE_FIELDS if not hasattr(sample, name)]:
            problem = f"there is no {' and no '.join(absent)}, which PRIME-RL has since {SAMPLES_SINCE}"
            raise ConfigError(type(sample).__name__, problem, "upgrade PRIME-RL")
    return found


# --- Names in the user's TOML --------------------------------------------------------------------------

LOSS_OPTIONS = {"type", "import_path", "kwargs"}  # of [trainer.loss] with type "custom"
SUPERVISED = "sft"  # the type of 0.5 that learns from no advantages; `native` has its other losses
SUPERVISED_IN = GENERATIONS[1]
# What selects such training in each later release.
SUPERVISED_NOW = dict.fromkeys((*GENERATIONS[3:], AFTER_559B447), 'type = "sft" in [orchestrator.algo]')
SUPERVISED_NOW |= {GENERATIONS[2]: 'training_mode = "sft" in [orchestrator]'}
DEFAULT_ALGORITHM = "grpo"
ECHO_ALGORITHM = "echo"
# "echo" also trains a cross-entropy on the tokens of these roles, which the policy did not sample, with this
# weight per token. [algo.roles] replaces the table; `alpha` of a role has the same default.
ECHO_ALPHA = 0.1
ECHO_ROLES: dict[str, Any] = {"tool": {"alpha": ECHO_ALPHA}}
# Algorithms whose samples PRIME-RL trains with a loss of its own, and with which one.
ROUTED = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}
# The modes of a whole run in 0.6, orchestrator.training_mode, and the functions that train without rewards in
# them. The mode "rl" trains with [trainer.loss].
TRAINING_MODE, MODE_OF_RL, TRAINING_MODE_IN = "orchestrator.training_mode", "rl", GENERATIONS[2]
TRAINING_MODES = {"opd": "opd_loss_fn", "sft": "sft_loss_fn"}
# Algorithms that subtract the mean of the group's rewards ("default" is the one of 0.5 and 0.6), and the
# options that set the group's size: in 0.6 and 0.7 one of them, before only the second, later only the first.
# It is 1 where none is set.
GROUP_RELATIVE = ("grpo", "echo", "max_rl", "default")
GROUP_SIZES = ("group_size", "rollouts_per_example")

# Tables and options on the way to the loss and its advantages, by the table that has them, in 0.5 to 559b447.
NAMES = {
    "": ("trainer", "orchestrator", "inference", "loss", "max_steps"),
    "trainer": ("loss",),
    "orchestrator": (
        *("algo", "advantage", "training_mode", "train", "env", "buffer", "teacher_model"),
        *("pre_batch_filters", "post_batch_filters", *GROUP_SIZES),
    ),
    "orchestrator.algo": ("type", "filter"),
    "orchestrator.train": ("source", "env", NEWEST_OPTION),
}
# PRIME-RL's other names there that are like one of those, and are not misspelt.
SIMILAR_NAMES = {"teacher_inference", "loss_impl", "train", "teacher", "teacher_rollout_model", "pool_size"}
SIMILAR_NAMES |= {"token_batch_size", "training_mode", "max_off_policy_steps"}
# Tables that an rl.toml has at the top and the files of its parts have not. A config for supervised training
# may have the last three, beside [data] and without [loss].
RL_TABLES = ("trainer", "orchestrator")
INFERENCE_TABLE, DEPLOYMENT_TABLES = "inference", ("deployment", "slurm")
# Tables at the top of a trainer's own config, which an rl.toml has below [trainer].
TRAINER_TABLES = ("loss", "optim", "scheduler", "data")
RL, TRAINER, ORCHESTRATOR, INFERENCE, SFT = "rl", "trainer", "orchestrator", "inference", "sft"
FAKE_DATA = {
    "fake"
}  # all that [data] of a trainer's own config may have; for supervised training it has more
# The files of the parts of a run, whose options an rl.toml has in the table of that name, and names at the
# top that tell each from the others.
OWN_FILES: dict[str, tuple[str, ...]] = {
    TRAINER: TRAINER_TABLES,
    ORCHESTRATOR: (
        *("algo", "advantage", "training_mode", "train", "env", "sampling", "buffer", *GROUP_SIZES),
        *(
            "batch_size",
            "token_batch_size",
            "oversampling_factor",
            "max_off_policy_steps",
            "num_train_workers",
        ),
        *("client", "student", "teacher", "teacher_model", "teacher_rollout_model", "filters", "val"),
        *("pre_batch_filters", "post_batch_filters", "max_inflight_rollouts", "max_inflight_episodes"),
    ),
    INFERENCE: ("server", "parallel", "vllm", "gpu_memory_utilization", "enable_lora", "api_server_count"),
}
FILE_NAMES = {
    RL: "an rl.toml",
    TRAINER: "a trainer's own config",
    ORCHESTRATOR: "an orchestrator's own config",
    INFERENCE: "an inference server's own config",
    SFT: "a config for supervised training",
}
WITHOUT_LOSS = (INFERENCE, SFT)  # kinds of file that have nothing to do with a policy loss
# Keys by what they have to do with the loss, from PRIME-RL's classes of 0.4 to 559b447. Those of the tables
# *NOT_CARRIED bear on it, unless they have one of these values, and `migrate` does not carry them over. Those
# of NO_BEARING_IN have no bearing on it. A key stands for everything below it.
SOURCES = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")
SAMPLINGS = ("orchestrator.sampling", "orchestrator.train.sampling")
FILTERS = ("orchestrator.filters", "orchestrator.pre_batch_filters", "orchestrator.post_batch_filters")
FILTERED_BY_ADVANTAGE = "zero_advantage"  # a filter that drops what trains nothing
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "orchestrator.teacher_rollout_model": (None,),
    "orchestrator.trajectory_strategy": (None, "interleaved"),
    "orchestrator.buffer.online_difficulty_filtering": (None, False),
    "trainer.enable_router_replay": (None, False),
}
_SAMPLED: dict[str, tuple[Any, ...]] = {"top_p": (None, 1.0), "top_k": (None, -1, 0), "min_p": (None, 0.0)}
_SAMPLED |= {"repetition_penalty": (None, 1.0)}
SAMPLING_NOT_CARRIED = {"temp_scheduler": (None,), **_SAMPLED}
SAMPLING_NOT_CARRIED |= {f"extra_body.{name}": values for name, values in _SAMPLED.items()}
ALGORITHM_NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None,),
    "length_weighted_baseline": (None, False),
    "length_weighted_mean": (None, False),  # of 0.4
    "length_shaping_alpha": (None,),  # of 0.5
    "loss_aggregation": (None, "token"),  # after 559b447
}
SOURCE_NOT_CARRIED: dict[str, tuple[Any, ...]] = {"curriculum.gates": (None, {})}
# Options of one algorithm, which is named where it is not GRPO.
ALGORITHM_OPTIONS = "type roles filter teacher demo_key template renderer sampling decay episode_agents"
ALGORITHM_OPTIONS += " import_path kwargs"
NO_BEARING_IN = {
    "": """
        bench ckpt clean clean_output_dir deployment dry_run env_vars file_monitor inference
        inference_gpu_ids log max_async_level max_model_len max_steps model monitors output_dir resume
        rollout_transport run seq_len slurm teacher_gpu_ids teacher_inference tokenizer toml_files
        trainer_gpu_ids wandb weight_broadcast
        """,
    "trainer": """
        bench ckpt data dist_timeout_seconds enable_token_export env_vars file_monitor gc heartbeat log
        matmul_precision max_async_level max_concurrent_runs max_steps memory_profiler_path metrics_server
        model monitors optim output_dir resume rollout_transport scheduler tokenizer trace_path wandb
        weight_broadcast
        """,
    "orchestrator": """
        batch_size bench buffer ckpt client collect_inference_metrics concurrency env_install_prerelease
        env_server_base_port env_vars eval file_monitor filters heartbeat inference_metrics_roles log
        mask_env_responses max_async_level max_concurrent max_env_worker_restarts max_inflight_episodes
        max_inflight_rollouts max_off_policy_steps max_steps model monitors num_train_workers optim
        output_dir oversampling_factor pad_to_multiple_of pool_size post_batch_filters pre_batch_filters
        prime_monitor reload_weights_on_start renderer resume rollout_transport seed seq_len
        strict_async_level student tasks_per_minute teacher teacher_model token_batch_size tokenizer
        use_token_client val verification wandb weight_broadcast workers_per_env
        """,
    "orchestrator.train": "filter_zero_advantages max_retries num_workers",
    **dict.fromkeys(
        SOURCES,
        """
        address agent args curriculum env extra_env_kwargs harness id legacy max_retries
        max_total_completion_tokens name num_workers ratio serve state_columns taskset timeout
        timeout_seconds
        """,
    ),
    **dict.fromkeys(
        (*SAMPLINGS, *(f"{one}.sampling" for one in SOURCES)),
        """
        extra_body.cache_salt extra_body.chat_template_kwargs extra_body.include_stop_str_in_output
        extra_body.max_tokens extra_body.min_tokens extra_body.prompt_logprobs extra_body.return_token_ids
        extra_body.skip_special_tokens extra_body.spaces_between_special_tokens extra_body.stop
        extra_body.stop_token_ids max_completion_tokens max_tokens min_tokens seed
        """,
    ),
}


def _known_keys() -> set[str]:
    """Every key of these tables, and those of the group's size, the temperature and the algorithm."""
    holders = ("orchestrator", *SOURCES)
    samplings = (*SAMPLINGS, *(f"{one}.sampling" for one in SOURCES))
    algorithms = [f"{one}.{name}" for one in holders for name in ("algo", "advantage")]
    keys = {f"{holder}.{name}" for holder, names in NO_BEARING_IN.items() for name in names.split()}
    keys |= {f"trainer.loss.{name}" for name in LOSS_OPTIONS}
    keys |= {f"{holder}.{name}" for holder in holders for name in GROUP_SIZES}
    keys |= {f"{one}.{name}" for one in samplings for name in ("temperature", *SAMPLING_NOT_CARRIED)}
    options = (*ALGORITHM_OPTIONS.split(), *ALGORITHM_NOT_CARRIED)
    keys |= {f"{one}.{name}" for one in algorithms for name in options}
    return {key.lstrip(".") for key in keys} | {TRAINING_MODE, *NOT_CARRIED}


KNOWN_KEYS = frozenset(_known_keys())
# PRIME-RL's own classes of these files, since 0.5. They reject most names that they do not know.
RL_CONFIG = ("prime_rl.configs.rl", "RLConfig")
TRAINER_CONFIG = ("prime_rl.configs.trainer", "TrainerConfig")
CONFIG_CLASSES = {
    RL: RL_CONFIG,
    TRAINER: TRAINER_CONFIG,
    ORCHESTRATOR: ("prime_rl.configs.orchestrator", "OrchestratorConfig"),
    INFERENCE: ("prime_rl.configs.inference", "InferenceConfig"),
    SFT: ("prime_rl.configs.sft", "SFTConfig"),
}
