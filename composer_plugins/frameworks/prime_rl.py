"""PRIME-RL: its releases, its losses with their options, and the other options that bear on the loss.

PRIME-RL has no options for every loss: each `type` in [trainer.loss] has its own, with its own defaults, in
some of the releases. The losses up to commit 559b447 are compared with PRIME-RL itself. The later ones come
from source text.
"""

from typing import Any, NamedTuple

from composer_plugins.frameworks.contract import (
    MINUS_ONE,
    ONE_MINUS,
    SAMPLING,
    Conversion,
    Framework,
    NamedLoss,
    Option,
    Sets,
    keys_in,
    with_tables,
)

# --- Releases ------------------------------------------------------------------------------------------


class Generation(NamedTuple):
    """Successive releases of PRIME-RL that call a custom loss in the same way, and have the same losses."""

    since: str  # a release, or the pull request that began it
    until: str  # the first release after it; "" for the newest
    denominator: str  # what the trainer divides the sum of a custom loss by
    hint: str  # what fills the reference log-probabilities beside RL; "" if nothing does
    replay: str  # what fills the weights; "" if nothing does


TEACHER, ECHO, NODE = "orchestrator.teacher_model", "echo filter", "verifiers node"
MICRO_BATCHES = "the number of micro-batches"
OWN_TOKENS, GLOBAL_TOKENS = "this rank's tokens", "the tokens of the global batch"
MODE = "token-mean"  # how the trainer reduces; since 0.6 over the whole batch

GENERATIONS = (
    Generation("0.4", "0.5", MICRO_BATCHES, TEACHER, ""),
    Generation("0.5", "0.6", OWN_TOKENS, TEACHER, ""),
    Generation("0.6", "0.7", GLOBAL_TOKENS, "", ""),  # a teacher and RL exclude each other in one run
    Generation("0.7", "0.8.1.dev52", GLOBAL_TOKENS, ECHO, ECHO),
    Generation("0.8.1.dev52", "#3418", GLOBAL_TOKENS, NODE, NODE),
    # Of 27 August, 10 and 18 September 2026, and later. The denominator became the sum of the weights of all
    # tokens, at a time that is not known. Those of a pair, +c and -c, cancel in it.
    Generation("#3418", "#3526", GLOBAL_TOKENS, NODE, ""),
    Generation("#3526", "#3586", GLOBAL_TOKENS, NODE, ""),
    Generation("#3586", "after #3586", GLOBAL_TOKENS, NODE, ""),
    Generation("after #3586", "", GLOBAL_TOKENS, NODE, ""),
)
_0_4, _0_5, _0_6, _0_7, TESTED, *UNTESTED = GENERATIONS  # the later ones are known from source text only
HEAD = GENERATIONS[-1]
NEWEST_TESTED = "0.8.1.dev67"  # the tag of commit 559b447
# What the trainer divides the sum of 0.4's own loss by, by its ratio_type, where that is another number than
# for a custom loss.
OWN_DENOMINATORS = {"token": OWN_TOKENS}
# The first release with samples that can be stamped, and the first verifiers with such nodes.
SAMPLES_SINCE, VERIFIERS_SINCE = "0.7", "commit 4bcb48e55 of August 2026"

# Files of PRIME-RL's package, and strings in them that tell its generation; the newest first. Its metadata do
# not: tag v0.4.0 says 0.1.0 there, v0.5.0 says 0.4.0, and everything after v0.8.0 says 0.8.0.
_LOSS, _CONFIG = "trainer/rl/loss.py", "configs/trainer.py"
FEATURES: tuple[tuple[Generation, str, str, bool], ...] = (  # whether the file has the string, or has it not
    (HEAD, _CONFIG, "class CISPOLossConfig", True),
    (UNTESTED[2], _CONFIG, " eps: float = Field(0.3", True),
    (UNTESTED[1], _LOSS, "class IcePopLoss", True),
    (UNTESTED[0], _LOSS, "default_loss_fn", False),
    (TESTED, "orchestrator/trajectories.py", "loss_weights", True),
    (_0_7, _LOSS, "def setup_rl_loss_fn", True),
    (_0_6, _LOSS, "def setup_loss_fns", True),
    (_0_5, _CONFIG, "class SFTLossConfig", True),
    (_0_4, _LOSS, "def setup_loss_fn", True),
)
# Names in the module of its losses that tell the generation.
LOSS_NAMES = (
    (HEAD, "CISPOLossConfig"),
    (UNTESTED[1], "IcePopLossConfig"),
    (_0_6, "setup_loss_fns"),
    (_0_4, "LossConfigType"),
)

# The fields of LossInputs beside the four of every release, by the first generation that has them.
LOSS_INPUTS = ((_0_4, ("teacher_logprobs",)), (_0_7, ("ref_logprobs", "loss_weights")))

# --- Its losses ----------------------------------------------------------------------------------------

CLIPPED = (
    *("ppo", "grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo"),
    *("cispo", "minirl", "opsm", "clip_cov", "rec", "fipo", "aspo", "tvpo"),
    *("ce_gppo", "cpgd"),
)
CAPPED = ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "ipo", "ipo_centered", "minirl", "masked_is")
NO_MASK = "a value of 1 or more masks nothing"


def _own(key: str, default: float | str, *parameters: str, objective: str = "", remark: str = "") -> Option:
    """An option that sets these parameters, or the one of its own name."""
    sets = (Sets(parameters or (key,)),)
    return Option(key=key, default=default, sets=sets, objective=objective, remark=remark)


def _region(key: str, default: float, *parameters: str) -> Option:
    """A bound of the change of a token's probability."""
    return _own(key, default, *parameters, remark=NO_MASK)


def _ratios(low: float, high: float) -> tuple[Option, Option]:
    """The two bounds of the ratio itself, of which ours are the distances from 1 where the loss clips it."""
    lows = Sets(("token_low",)), Sets(("clip_low",), CLIPPED, ONE_MINUS)
    highs = Sets(("token_high",)), Sets(("clip_high",), CLIPPED, MINUS_ONE)
    return (
        Option(key="ratio_low", default=low, sets=lows),
        Option(key="ratio_high", default=high, sets=highs),
    )


_ADV, _KL, _NO_KL = (
    _own("adv_tau", 1.0, objective="channels.policy_weight"),
    _own("kl_tau", 1e-3),
    _own("kl_tau", 0.0),
)
_CAPPED = Sets(("ratio_cap",), CAPPED)
_CAP = Option(key="max_importance_ratio", default=1e4, sets=(Sets(("weight_cap",)), _CAPPED))
# In 0.4 and 0.5 a part of the advantages.
TEACHER_TAU = Option(
    key="teacher_tau",
    default=0.0,
    objective="channels.hint_weight",
    remark='divided by adv_tau; with hint_estimator = "advantage"',
)
_CENTERS = Conversion(
    values={True: "ipo_centered", False: "ipo@prime-rl"}, text="'ipo_centered' where it is true"
)
_CENTERED = Option(key="score_centering", default=False, objective="policy", conversion=_CENTERS)
_SEQUENCE = ("ratio_type", "sequence")
_0_4_OPTIONS = (
    _own("ratio_type", "token", "level", remark='with "sequence", 0.4 divides each sequence by its tokens'),
    _own("token_mask_low", 0.125, "token_low"),
    _own("token_mask_high", 8.0, "token_high"),
    _own("geo_mask_low", 0.1, "geo_low"),
    _own("geo_mask_high", 10.0, "geo_high"),
    _own("sequence_mask_low", 0.0, "sequence_low"),
    _own("sequence_mask_high", 100.0, "sequence_high"),
    Option(key="sequence_clip_high", default=10.0, sets=(_CAPPED,), only_with=_SEQUENCE),
    *(_ADV, _NO_KL, TEACHER_TAU),
)
_0_5_OPTIONS = (_region("ipo_mask_low", 0.2, "tv_low"), _region("ipo_mask_high", 0.2, "tv_high"), _ADV, _KL)
_DPPO = (_region("dppo_mask_low", 0.2, "tv_low"), _region("dppo_mask_high", 0.2, "tv_high"), _ADV, _KL)


def _ipo(key: str, default: float, *others: Option) -> tuple[Option, ...]:
    """The options of IPO, whose one bound is of both directions."""
    return _region(key, default, "tv_low", "tv_high"), *others


_DEFAULT, _IPO = {"type": "default"}, {"type": "ipo"}
IPO = "ipo@prime-rl"
LOSSES = (
    NamedLoss("masked_is@prime-rl<0.5", _DEFAULT, _0_4_OPTIONS, until="0.5"),
    NamedLoss("ipo@prime-rl<0.6", _DEFAULT, (*_0_5_OPTIONS, TEACHER_TAU), since="0.5", until="0.6"),
    NamedLoss("dppo_tv@prime-rl", _DEFAULT, _DPPO, since="0.6", until="#3418"),
    NamedLoss(IPO, _IPO, _ipo("ipo_threshold", 0.1, _ADV, _KL), since="0.6", until="#3418"),
    NamedLoss(IPO, _IPO, _ipo("eps", 0.1, _ADV, _KL), since="#3418", until="#3586"),
    NamedLoss(IPO, _IPO, _ipo("eps", 0.3, _ADV, _NO_KL), since="#3586", until="after #3586"),
    NamedLoss(IPO, _IPO, _ipo("eps", 0.3, _CAP, _ADV, _CENTERED), {"kl_tau": 0.0}, since="after #3586"),
    NamedLoss("masked_is", {"type": "icepop"}, (*_ratios(0.2, 5.0), _ADV), since="#3526"),
    NamedLoss("ppo", {"type": "ppo"}, (*_ratios(0.8, 1.2), _CAP, _ADV), since="after #3586"),
    NamedLoss("cispo", {"type": "cispo"}, (*_ratios(0.0, 5.0), _ADV), since="after #3586"),
)

# --- The other options of the user's TOML --------------------------------------------------------------

NEWEST_OPTION = "filter_zero_advantages"  # of the orchestrator
ALWAYS_FILTERED = UNTESTED[1:]  # without that option, which #3463 of 1 September removed
LOSS_OPTIONS = {"type", "import_path", "kwargs"}  # of [trainer.loss] with type "custom"
SUPERVISED = "sft"  # the type of 0.5 that learns from no advantages; `LOSSES` has its other losses
SUPERVISED_IN = _0_5
# What selects such training in each later release.
SUPERVISED_NOW = dict.fromkeys(GENERATIONS[3:], 'type = "sft" in [orchestrator.algo]')
SUPERVISED_NOW |= {_0_6: 'training_mode = "sft" in [orchestrator]'}
DEFAULT_ALGORITHM = "grpo"
# The advantages that an algorithm computes.
ADVANTAGES = {"grpo": "dr_grpo@prime-rl", "echo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}
ALGORITHMS = {row.partition("@")[0]: kind for kind, row in reversed(ADVANTAGES.items())}
ADVANTAGES |= {"default": "dr_grpo@prime-rl"}  # of 0.4 to 0.6, in [orchestrator.advantage]
ECHO_ALGORITHM = "echo"
# "echo" also trains a cross-entropy on the tokens of these roles, which the policy did not sample, with this
# weight per token. [algo.roles] replaces the table; `alpha` of a role has the same default.
ECHO_ALPHA = 0.1
ECHO_ROLES: dict[str, Any] = {"tool": {"alpha": ECHO_ALPHA}}
# Algorithms whose samples PRIME-RL trains with a loss of its own, and with which one.
ROUTED = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}
# The modes of a whole run in 0.6, orchestrator.training_mode, and the functions that train without rewards in
# them. The mode "rl" trains with [trainer.loss].
TRAINING_MODE, MODE_OF_RL, TRAINING_MODE_IN = "orchestrator.training_mode", "rl", _0_6
TRAINING_MODES = {"opd": "opd_loss_fn", "sft": "sft_loss_fn"}
# Every type of an algorithm, from 0.4 to 559b447. "None" stands for null.
ALGORITHM_TYPES = {*ADVANTAGES, *ROUTED, "rae", "hierarchical_grpo", "custom", "None"}
# Algorithms that subtract the mean of the group's rewards ("default" is the one of 0.5 and 0.6), and the
# options that set the group's size: in 0.6 and 0.7 one of them, before only the second, later only the first.
# It is 1 where none is set.
GROUP_RELATIVE = ("grpo", "echo", "max_rl", "default")
INHERITED = "toml_files"  # of 0.4: files that are read before the one that names them
GROUP_SIZES, DEFAULT_GROUP_SIZE = ("group_size", "rollouts_per_example"), 1

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
    "orchestrator.buffer.easy_threshold": (None,),
    "orchestrator.buffer.hard_threshold": (None,),
    "orchestrator.buffer.skip_verification": (None, False),  # of 0.4: every reward is 0
    "orchestrator.verification.enabled": (None, True),  # of 0.5
    "trainer.enable_router_replay": (None, False),
}
SAMPLING_NOT_CARRIED = {"temp_scheduler": (None,), **SAMPLING}
SAMPLING_NOT_CARRIED |= {f"extra_body.{name}": values for name, values in SAMPLING.items()}
ALGORITHM_NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None,),
    "length_weighted_baseline": (None, False),
    "length_weighted_mean": (None, False),  # of 0.4
    "length_shaping_alpha": (None,),  # of 0.5
    "loss_aggregation": (None, "token"),  # after 559b447
}
SOURCE_NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "curriculum.gates": (None, {}),
    "curriculum.sampler.type": (None, "standard"),
}
# Options of one algorithm, which is named where it is not GRPO.
ALGORITHM_OPTIONS = "type roles filter teacher demo_key template renderer sampling decay episode_agents"
ALGORITHM_OPTIONS += " import_path kwargs"
NO_BEARING_IN = {
    "": """
        bench ckpt clean clean_output_dir deployment dry_run env_vars experimental file_monitor inference
        inference_gpu_ids log max_async_level max_model_len max_steps model monitors output_dir resume
        rollout_transport run seq_len slurm teacher_gpu_ids teacher_inference tokenizer trainer_gpu_ids
        wandb weight_broadcast
        """,
    "trainer": """
        bench ckpt data dist_timeout_seconds enable_token_export env_vars file_monitor gc heartbeat log
        matmul_precision max_async_level max_concurrent_runs max_steps memory_profiler_path metrics_server
        model monitors optim output_dir resume rollout_transport scheduler tokenizer trace_path wandb
        weight_broadcast
        """,
    "orchestrator": """
        batch_size bench buffer ckpt client collect_inference_metrics concurrency env_install_prerelease
        env_server_base_port env_vars eval experimental file_monitor filters heartbeat
        inference_metrics_roles log
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
    keys = {f"trainer.loss.{name}" for name in LOSS_OPTIONS}
    keys |= {f"{holder}.{name}" for holder in holders for name in GROUP_SIZES}
    keys |= {f"{one}.{name}" for one in samplings for name in ("temperature", *SAMPLING_NOT_CARRIED)}
    options = (*ALGORITHM_OPTIONS.split(), *ALGORITHM_NOT_CARRIED)
    keys |= {f"{one}.{name}" for one in algorithms for name in options}
    return keys | {TRAINING_MODE, *NOT_CARRIED}


NO_BEARING = keys_in(NO_BEARING_IN)
KNOWN_KEYS = frozenset(_known_keys() | NO_BEARING)

# The releases whose keys are known, and the keys that not all of them have, by the first and the last release
# that has them. A key stands for everything below it.
RELEASES = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.8.1.dev52")
_LIFETIMES = {
    ("0.4", "0.4"): """
        inference_gpu_ids orchestrator.advantage.length_weighted_mean orchestrator.buffer.skip_verification
        orchestrator.mask_env_responses orchestrator.max_env_worker_restarts
        orchestrator.reload_weights_on_start orchestrator.trajectory_strategy orchestrator.workers_per_env
        teacher_gpu_ids toml_files trainer_gpu_ids
        """,
    ("0.4", "0.5"): """
        max_async_level max_model_len orchestrator.buffer orchestrator.max_async_level
        orchestrator.max_concurrent orchestrator.sampling.min_tokens
        orchestrator.sampling.repetition_penalty orchestrator.sampling.seed
        orchestrator.sampling.temp_scheduler orchestrator.seed orchestrator.strict_async_level
        orchestrator.val teacher_inference trainer.max_async_level
        """,
    ("0.4", "0.6"): "orchestrator.advantage orchestrator.client orchestrator.teacher_model",
    ("0.4", "0.7"): "orchestrator.env orchestrator.rollouts_per_example orchestrator.sampling",
    ("0.4", "0.8"): """
        bench orchestrator.bench orchestrator.optim orchestrator.oversampling_factor
        orchestrator.prime_monitor orchestrator.wandb trainer.bench trainer.max_concurrent_runs
        trainer.wandb wandb
        """,
    ("0.5", "0.5"): """
        orchestrator.advantage.length_shaping_alpha orchestrator.filters orchestrator.teacher_rollout_model
        orchestrator.use_token_client orchestrator.verification
        """,
    ("0.5", "0.7"): "orchestrator.max_inflight_rollouts",
    ("0.5", "0.8"): "clean_output_dir",
    ("0.5", ""): "deployment dry_run orchestrator.token_batch_size slurm trainer.enable_router_replay",
    ("0.6", "0.6"): """
        experimental orchestrator.advantage.length_penalty orchestrator.advantage.length_weighted_baseline
        orchestrator.env_install_prerelease orchestrator.experimental orchestrator.student
        orchestrator.teacher orchestrator.train.env.advantage orchestrator.train.max_retries
        orchestrator.train.num_workers orchestrator.training_mode
        """,
    ("0.6", "0.7"): "orchestrator.pool_size orchestrator.train.env",
    ("0.6", "0.8"): "orchestrator.post_batch_filters orchestrator.pre_batch_filters",
    ("0.6", ""): """
        orchestrator.collect_inference_metrics orchestrator.group_size orchestrator.inference_metrics_roles
        orchestrator.renderer orchestrator.tokenizer orchestrator.train tokenizer
        trainer.enable_token_export trainer.gc trainer.matmul_precision
        """,
    ("0.7", "0.7"): "orchestrator.train.env.algo",
    ("0.7", ""): "env_vars orchestrator.algo orchestrator.env_vars trainer.env_vars",
    ("0.8", "0.8"): """
        file_monitor orchestrator.file_monitor orchestrator.max_inflight_episodes trainer.file_monitor
        """,
    ("0.8", ""): """
        orchestrator.algo.decay orchestrator.algo.episode_agents orchestrator.env_server_base_port
        orchestrator.train.source rollout_transport
        """,
    ("0.8.1.dev52", ""): """
        monitors orchestrator.concurrency orchestrator.monitors orchestrator.pad_to_multiple_of
        orchestrator.resume orchestrator.train.filter_zero_advantages orchestrator.train.source.curriculum
        resume run trainer.monitors trainer.resume
        """,
}
LIFETIMES = {
    key: (first, last or RELEASES[-1]) for (first, last), keys in _LIFETIMES.items() for key in keys.split()
}
# Keys of one meaning, of which a release has one.
SAME_IN_OTHERS = (
    ("orchestrator.env", "orchestrator.train.env", "orchestrator.train.source"),
    ("orchestrator.sampling", "orchestrator.train.sampling"),
    ("orchestrator.rollouts_per_example", "orchestrator.group_size"),
    ("orchestrator.advantage", "orchestrator.algo"),
    ("orchestrator.training_mode", "orchestrator.algo.type"),
    ("orchestrator.train.env.advantage", "orchestrator.train.env.algo", "orchestrator.train.source.algo"),
    ("orchestrator.filters", "orchestrator.post_batch_filters"),
    ("orchestrator.teacher_model", "orchestrator.algo.teacher"),
    ("orchestrator.teacher", "orchestrator.algo.teacher"),
    ("orchestrator.student", "orchestrator.model"),
    ("orchestrator.client", "orchestrator.model.client"),
    (
        "orchestrator.max_concurrent",
        "orchestrator.max_inflight_rollouts",
        "orchestrator.max_inflight_episodes",
    ),
    ("orchestrator.max_inflight_rollouts", "orchestrator.concurrency.max_inflight"),
    ("orchestrator.buffer.skip_verification", "orchestrator.verification.enabled"),
    ("wandb", "monitors.wandb"),
    ("trainer.wandb", "trainer.monitors.wandb"),
    ("orchestrator.wandb", "orchestrator.monitors.wandb"),
    ("orchestrator.prime_monitor", "orchestrator.monitors.prime"),
    ("file_monitor", "monitors.file"),
    ("clean", "clean_output_dir"),
)


def lifetime(key: str) -> tuple[str, str]:
    """The first and the last of `RELEASES` that have a key."""
    found = (LIFETIMES[one] for one in with_tables(key) if one in LIFETIMES)
    return next(found, (RELEASES[0], RELEASES[-1]))


def is_in(key: str, release: str) -> bool:
    """Whether one of `RELEASES` has a key."""
    first, last = map(RELEASES.index, lifetime(key))
    return first <= RELEASES.index(release) <= last


def of_another_release(key: str, release: str) -> tuple[str, str] | None:
    """The problem and the remedy for a key that other releases than this one have; None if it has the key."""
    if is_in(key, release):
        return None
    first, last = lifetime(key)
    having = f"PRIME-RL {first} to {last} have it"
    if last == RELEASES[-1]:
        having = f"PRIME-RL has it since {first}"
    elif first == last:
        having = f"PRIME-RL {first} has it"
    others = [
        one for same in SAME_IN_OTHERS if any(f"{key}.".startswith(f"{x}.") for x in same) for one in same
    ]
    here = next((one for one in others if not f"{key}.".startswith(f"{one}.") and is_in(one, release)), "")
    remedy = f"set {here}, which has its place" if here else "remove it"
    return f"{having}, and PRIME-RL {release} does not", f"{remedy}, or name another --version"


def _top(kind: str) -> set[str]:
    """The names at the top of the file of a part, which an rl.toml has in the table of this name."""
    return {one.split(".")[1] for one in KNOWN_KEYS if one.startswith(f"{kind}.")}


# The files of the parts of a run, and names at the top that tell each from the others.
OWN_FILES: dict[str, set[str]] = {
    TRAINER: _top(TRAINER) - _top(ORCHESTRATOR),
    ORCHESTRATOR: _top(ORCHESTRATOR) - _top(TRAINER),
    INFERENCE: {"server", "parallel", "vllm", "gpu_memory_utilization", "enable_lora", "api_server_count"},
}
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

_BY_ALGORITHM = "PRIME-RL's algorithm computes the advantages", "set [orchestrator.algo], and remove it"
_BY_TEACHER = "the teacher is whatever computed the reference log-probabilities", "remove it"
_ONE_TOKEN = "PRIME-RL provides the log-probability of the sampled token only", "remove it"
_PAIRS = (
    "the trainer computes no preference loss: the environment writes DPO's gradient on the tokens of each "
    "pair, with stamps.stamp_replay_pair"
)
# Options of ours: why the loss does not decide them here, and what to do.
DECIDED_ELSEWHERE = {
    "advantage": _BY_ALGORITHM,
    "advantage_params": _BY_ALGORITHM,
    "on_bad_reward": (
        "PRIME-RL's algorithm computes the advantages from the rewards",
        "remove it, and let the environment return finite rewards",
    ),
    "hint_teacher": _BY_TEACHER,
    "hint_ema_rate": _BY_TEACHER,
    "hint_top_k": _ONE_TOKEN,
    "hint_t_start": _ONE_TOKEN,
    "teacher_prompt_template": _BY_TEACHER,
    "replay_loss": (_PAIRS, "remove it; for another loss than DPO see docs/prime_rl.md, Hints and pairs"),
    "replay_temperature": (_PAIRS, "remove it; for another one see docs/prime_rl.md, Hints and pairs"),
    "replay_params": (_PAIRS, "remove it, and give beta to stamps.stamp_replay_pair"),
}

CLONE = (
    "git clone https://github.com/PrimeIntellect-ai/prime-rl, add --source prime-rl, and pip install "
    "transformers pydantic-settings prime-pydantic-config tomli tomli-w loguru msgspec"
)

PRIME_RL = Framework(
    name="prime-rl",
    title="PRIME-RL",
    path="composer_plugins.adapters.prime_rl_plugin:loss_fn",
    summary="a loss_fn for trainer.loss.import_path: any policy loss, sampled-token hints, replay pairs",
    releases=tuple(one.since for one in GENERATIONS),
    losses=LOSSES,
    options=tuple({option.key: option for one in LOSSES for option in one.own}.values()),
    provides={
        # old_logprobs with `old_policy`: the rollout engine's or the policy's own
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"support_logprobs", "rollout_support_logprobs", "mask"}
        ),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "mask"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
    partial_batch=dict.fromkeys(
        ("policy", "divergence", "correction"), "PRIME-RL calls a loss with one sequence at a time"
    ),
    marks=("orchestrator",),
    not_carried=NOT_CARRIED,
    no_bearing=NO_BEARING,
    install=CLONE,
    programs=(
        *("rl", "trainer", "orchestrator", "*.entrypoints.rl", "*.entrypoints.trainer"),
        *("*.entrypoints.orchestrator", "*.trainer.rl.train", "*.orchestrator.orchestrator"),
    ),
    has_several_files=True,
    suffixes=(".toml",),
    convention="composer_plugins.adapters.prime_rl_plugin.convention:PRIME_RL",
    claims="composer_plugins.conformance.prime_rl_claims.suite",
    doctor="composer_plugins.adapters.prime_rl_plugin.doctor",
    migration="composer_plugins.adapters.prime_rl_plugin.migration",
)
