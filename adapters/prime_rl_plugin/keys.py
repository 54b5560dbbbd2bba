"""PRIME-RL's options beside its losses that bear on the loss, and the kinds of its files: for the doctor and
`migrate`.
"""

from typing import Any

from composer_plugins.frameworks.contract import SAMPLING, keys_in
from composer_plugins.frameworks.prime_rl import LOSS_OPTIONS

NEWEST_OPTION = "filter_zero_advantages"  # of the orchestrator, since 0.8.1.dev52
DEFAULT_ALGORITHM = "grpo"
# The advantages that an algorithm computes.
ADVANTAGES = {"grpo": "dr_grpo@prime-rl", "echo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}
ALGORITHMS = {row.partition("@")[0]: kind for kind, row in reversed(ADVANTAGES.items())}
ECHO_ALGORITHM = "echo"
# "echo" also trains a cross-entropy on the tokens of these roles, which the policy did not sample, with this
# weight per token. [algo.roles] replaces the table; `alpha` of a role has the same default.
ECHO_ALPHA = 0.1
ECHO_ROLES: dict[str, Any] = {"tool": {"alpha": ECHO_ALPHA}}
# Algorithms whose samples PRIME-RL trains with a loss of its own, and with which one.
ROUTED = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}
# Every type of an algorithm. "None" stands for null.
ALGORITHM_TYPES = {*ADVANTAGES, *ROUTED, "rae", "hierarchical_grpo", "custom", "None"}
# A group has one completion where its size is not set.
GROUP_SIZE, DEFAULT_GROUP_SIZE = "group_size", 1

# Tables that an rl.toml has at the top and the files of its parts have not. A config for supervised training
# may have the last three, beside [data] and without [loss].
RL_TABLES = ("trainer", "orchestrator")
INFERENCE_TABLE, DEPLOYMENT_TABLES = "inference", ("deployment", "slurm")
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
# Keys by what they have to do with the loss, from PRIME-RL's classes. Those of the tables *NOT_CARRIED bear
# on it, unless they have one of these values, and `migrate` does not carry them over. Those of NO_BEARING_IN
# have no bearing on it. A key stands for everything below it.
SOURCES = ("orchestrator.train.source",)
SAMPLINGS = ("orchestrator.train.sampling",)
FILTERS = ("orchestrator.pre_batch_filters", "orchestrator.post_batch_filters")
FILTERED_BY_ADVANTAGE = "zero_advantage"  # a filter that drops what trains nothing
NOT_CARRIED: dict[str, tuple[Any, ...]] = {"trainer.enable_router_replay": (None, False)}
SAMPLING_NOT_CARRIED = {**SAMPLING, **{f"extra_body.{name}": values for name, values in SAMPLING.items()}}
ALGORITHM_NOT_CARRIED: dict[str, tuple[Any, ...]] = {"length_penalty": (None,)}
SOURCE_NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "curriculum.gates": (None, {}),
    "curriculum.sampler.type": (None, "standard"),
}
# Options of one algorithm, which is named where it is not GRPO.
ALGORITHM_OPTIONS = "type roles filter teacher demo_key template renderer sampling decay episode_agents"
ALGORITHM_OPTIONS += " import_path kwargs"
NO_BEARING_IN = {
    "": """
        bench ckpt clean clean_output_dir deployment dry_run env_vars file_monitor inference log max_steps
        model monitors output_dir resume rollout_transport run seq_len slurm tokenizer wandb weight_broadcast
        """,
    "trainer": """
        bench ckpt data dist_timeout_seconds enable_token_export env_vars file_monitor gc heartbeat log
        matmul_precision max_concurrent_runs max_steps memory_profiler_path metrics_server
        model monitors optim output_dir resume rollout_transport scheduler tokenizer trace_path wandb
        weight_broadcast
        """,
    "orchestrator": """
        batch_size bench ckpt collect_inference_metrics concurrency env_server_base_port env_vars eval
        file_monitor heartbeat inference_metrics_roles log max_inflight_episodes max_off_policy_steps
        max_steps model monitors num_train_workers optim output_dir oversampling_factor pad_to_multiple_of
        post_batch_filters pre_batch_filters prime_monitor renderer resume rollout_transport seq_len
        tasks_per_minute token_batch_size tokenizer wandb weight_broadcast
        """,
    "orchestrator.train": "filter_zero_advantages",
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
    algorithms = [f"{one}.algo" for one in holders]
    keys = {f"trainer.loss.{name}" for name in LOSS_OPTIONS}
    keys |= {f"{holder}.{GROUP_SIZE}" for holder in holders}
    keys |= {f"{one}.{name}" for one in samplings for name in ("temperature", *SAMPLING_NOT_CARRIED)}
    options = (*ALGORITHM_OPTIONS.split(), *ALGORITHM_NOT_CARRIED)
    keys |= {f"{one}.{name}" for one in algorithms for name in options}
    return keys | {*NOT_CARRIED}


NO_BEARING = keys_in(NO_BEARING_IN)
KNOWN_KEYS = frozenset(_known_keys() | NO_BEARING)


def _top(kind: str) -> set[str]:
    """The names at the top of the file of a part, which an rl.toml has in the table of this name."""
    return {one.split(".")[1] for one in KNOWN_KEYS if one.startswith(f"{kind}.")}


# The files of the parts of a run, and names at the top that tell each from the others.
OWN_FILES: dict[str, set[str]] = {
    TRAINER: _top(TRAINER) - _top(ORCHESTRATOR),
    ORCHESTRATOR: _top(ORCHESTRATOR) - _top(TRAINER),
    INFERENCE: {"server", "parallel", "vllm", "gpu_memory_utilization", "enable_lora", "api_server_count"},
}
# PRIME-RL's own classes of these files. They reject most names that they do not know.
RL_CONFIG = ("prime_rl.configs.rl", "RLConfig")
TRAINER_CONFIG = ("prime_rl.configs.trainer", "TrainerConfig")
CONFIG_CLASSES = {
    RL: RL_CONFIG,
    TRAINER: TRAINER_CONFIG,
    ORCHESTRATOR: ("prime_rl.configs.orchestrator", "OrchestratorConfig"),
    INFERENCE: ("prime_rl.configs.inference", "InferenceConfig"),
    SFT: ("prime_rl.configs.sft", "SFTConfig"),
}
