"""verl: its options and their keys, its names of losses, and what a registered loss is called with."""

from typing import Any

from composer_plugins.frameworks.contract import SAMPLING, Conversion, Framework, NamedLoss, Option, Sets
from composer_plugins.losses.row import Kind


class Key:
    """The keys of verl's config that the adapter reads or names in a message."""

    ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    GROUP_SIZE, TEMPERATURE = f"{ROLLOUT}.n", f"{ROLLOUT}.temperature"
    ESTIMATOR, CRITIC = "algorithm.adv_estimator", "critic.enable"
    POLICY_LOSS = f"{ACTOR}.policy_loss"
    LOSS_MODE, LOSS_TARGET = f"{POLICY_LOSS}.loss_mode", f"{POLICY_LOSS}._target_"
    AGG_MODE, SCALE_FACTOR = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    ENTROPY, SHUFFLE = f"{ACTOR}.entropy_coeff", f"{ACTOR}.shuffle"
    USE_KL_LOSS, KL_COEF, KL_TYPE = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
    KL_IN_REWARD, REWARD_KL_TYPE = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
    KL_CONTROL, REWARD_KL_COEF = "algorithm.kl_ctrl", "algorithm.kl_ctrl.kl_coef"
    CORRECTION = "algorithm.rollout_correction"
    CORRECTED, REJECTED = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
    THRESHOLD, NORMALISE = f"{CORRECTED}_threshold", f"{CORRECTED}_batch_normalize"
    FILTER_GROUPS = "algorithm.filter_groups.enable"
    BYPASS, ROLLOUT_LOGPROBS = f"{CORRECTION}.bypass_mode", f"{ROLLOUT}.calculate_log_probs"
    FUSED_KERNELS, EXTERNAL_LIB = f"{MODEL}.use_fused_kernels", f"{MODEL}.external_lib"
    ADAPTERS = (f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path")
    LORA = (f"{MODEL}.lora.rank", f"{MODEL}.lora_rank", *ADAPTERS)
    USE_V1, TRAINER_MODE = "trainer.use_v1", "trainer.v1.trainer_mode"
    PROJECT = "trainer.project_name"  # in every config that begins with verl's defaults
    TRAIN_FILES, DATASET_CLASS = "data.train_files", "data.custom_cls.path"
    DISTILLATION = "distillation.enabled"
    TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"


DEFAULT_MODE, NORM_MODE = "token-mean", "seq-mean-token-sum-norm"
MODES = (DEFAULT_MODE, "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM_MODE)
MODES_SINCE = {"token-sum": (0, 9)}
MEAN_OVER_ROWS = "geo_mean"  # a loss of verl's that counts every row of a micro-batch, empty ones too
BY_GEOMETRIC_MEAN = ("gmpo@verl",)  # weighs a row by the geometric mean of its rollout correction's weights
# verl logs the clip fractions of its geo_mean by the sign of the advantage, and for sapo it logs 0.
CLIPPED_BY_SIGN, NEVER_CLIPPED = ("gmpo",), ("sapo",)
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_CORRECTED = "verl corrects for the rollout engine itself", "remove it, and set algorithm.rollout_correction"
UNAVAILABLE = {
    "old_policy": ("verl keeps old_log_probs itself", "remove it"),
    **dict.fromkeys(("rollout_correction", "rollout_correction_params"), _CORRECTED),
    "hint_ema_rate": ("verl keeps no average of the policy's weights", "remove it"),
    "replay_temperature": ("verl computes every log-probability at rollout.temperature", "remove it"),
}
SHOWS_LOGITS = ("fsdp", "fsdp2")  # engines that pass a loss function the logits of the whole vocabulary

# By input of a policy loss, the field of verl's batch that verl passes to none of its registered functions.
BATCH_INPUTS = {"ref_logprobs": "ref_log_prob", "rollout_logprobs": "rollout_log_probs"}

# verl's names of its own losses, estimators and KL estimators, each with its row; of two names of one KL
# estimator, the first is written. FORCED has the mode in which verl always reduces a loss.
LOSSES = {
    **{"vanilla": "grpo@verl", "gspo": "gspo_token@verl"},
    **{name: f"{name}@verl" for name in ("sapo", "gpg", "cispo", "dppo_tv", "dppo_kl")},
    **{"dro": "dro", "geo_mean": "gmpo@verl", "clip_cov": "clip_cov@verl", "kl_cov": "kl_cov@verl"},
}
FORCED = dict.fromkeys(("sapo", "geo_mean"), "seq-mean-token-mean")
ESTIMATORS = {
    **{name: f"{name}@verl" for name in ("grpo", "rloo", "opo", "gpg", "remax", "gdpo", "gae")},
    "grpo_vectorized": "grpo@verl",
    "rloo_vectorized": "rloo",
    "grpo_passk": "pass_at_k@verl",
    "reinforce_plus_plus": "reinforce_pp@verl",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline@verl",
    **{name: f"{name}@verl" for name in TOKEN_BASELINES},
}
KL_ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1@verl"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), "k2@verl"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3@verl"),
    **dict.fromkeys(("k1+", "kl+"), "k1_plus@verl"),
    **dict.fromkeys(("k3+", "low_var_kl+"), "k3_plus@verl"),
    "abs": "abs@verl",
}

# The option that chooses a loss of each kind, in its table below.
CHOOSES: dict[Kind, str] = {"policy": "loss_mode", "advantage": "adv_estimator", "kl": "kl_penalty"}
TABLES: dict[Kind, str] = {"policy": Key.ACTOR, "advantage": "algorithm"}

# The losses whose ratio_cap bounds the weight.
REGIONS = ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "ipo", "ipo_centered")
WEIGHT_CAPPED = (*REGIONS, "minirl", "masked_is")
LOW = tuple(Sets((name,)) for name in ("clip_low", "tv_low", "kl_low"))
HIGH = tuple(Sets((name,)) for name in ("clip_high", "tv_high", "kl_high"))
BOTH = tuple(Sets(low.parameters + high.parameters) for low, high in zip(LOW, HIGH, strict=True))

OWN_TERM = "as in verl, which adds this term to the policy loss"
DENOMINATOR = "as in verl, where the denominator depends on it"
CHOICE = "it chooses the loss or the estimator"
BATCHES = "as in verl, which cuts the batch so"
REWARD = "as in verl, which changes the rewards before the advantage is computed"
WEIGHTS = "as in verl, which multiplies the loss of each token by the weights, or masks it out"


# The defaults of algorithm.rollout_correction, and of policy_loss.rollout_correction, which only verl's loss
# bypass_mode reads.
OFF_POLICY: dict[str, Any] = {"rollout_is": None, "rollout_is_threshold": 2.0}
OFF_POLICY |= {"rollout_is_batch_normalize": False, "rollout_rs": None, "rollout_rs_threshold": None}
OFF_POLICY |= {"bypass_mode": False, "loss_type": "ppo_clip"}
OF_BYPASS = OFF_POLICY | {"rollout_is": "sequence"}
# Options that act with our losses as with verl's own: verl reads them outside of the functions in its
# registries, or the adapter reads them. Each row: the kind, the effect, and their defaults.
ACTING: tuple[tuple[Kind, str, dict[str, Any]], ...] = (
    ("policy", OWN_TERM, {"entropy_coeff": 0.0, "calculate_entropy": False, "use_kl_loss": False}),
    ("policy", OWN_TERM, {"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}),
    ("policy", BATCHES, {"ppo_mini_batch_size": 256, "ppo_epochs": 1}),
    ("policy", BATCHES, {"shuffle": False, "data_loader_seed": 42}),
    ("policy", CHOICE, {"policy_loss": None, "policy_loss.loss_mode": "vanilla"}),
    ("policy", CHOICE, {"policy_loss.rollout_correction": None}),  # each of its options is in OPTIONS
    ("advantage", CHOICE, {"adv_estimator": "gae"}),
    ("advantage", REWARD, {"use_kl_in_reward": False, "pf_ppo": None}),  # the second with use_pf_ppo
    ("advantage", REWARD, {"kl_penalty": "kl", "kl_ctrl.type": "fixed", "kl_ctrl.kl_coef": 0.001}),
    ("advantage", REWARD, {"kl_ctrl.horizon": 10000, "kl_ctrl.target_kl": 0.1}),
    ("advantage", WEIGHTS, {"rollout_correction": None}),
    ("advantage", WEIGHTS, {f"rollout_correction.{key}": x for key, x in OFF_POLICY.items()}),
    ("policy", DENOMINATOR, {"loss_agg_mode": DEFAULT_MODE, "global_batch_info": None}),
    ("policy", DENOMINATOR, {"loss_scale_factor": None}),
)


def _sets(kind: Kind, key: str, default: Any, *sets: Sets, fallback: str = "") -> Option:
    return Option(key=key, kind=kind, default=default, sets=sets, fallback=fallback)


# Every option that verl's loss and advantage code reads. Those without an effect are of verl's own losses,
# and set no parameter of ours: `verl_plugin.upstream.moved`. A test compares keys and defaults with verl's.
OPTIONS = (
    _sets("policy", "clip_ratio_low", 0.2, *LOW, fallback="clip_ratio"),
    _sets("policy", "clip_ratio_high", 0.2, *HIGH, fallback="clip_ratio"),
    _sets("policy", "clip_ratio", 0.2),  # verl reads it where one of the two is null
    _sets("policy", "clip_ratio_c", 3.0, Sets(("dual_clip",)), Sets(("ratio_cap",), WEIGHT_CAPPED)),
    _sets("policy", "tau_pos", 1.0, Sets(("tau_pos",))),
    _sets("policy", "tau_neg", 1.05, Sets(("tau_neg",))),
    _sets("policy", "policy_loss.dro_beta", None, Sets(("beta",), ("dro",))),
    *(
        _sets("policy", f"policy_loss.{key}", default, Sets((name,), (loss,)))
        for key, default, name, loss in (
            ("clip_cov_ratio", 0.0002, "cov_ratio", "clip_cov"),
            ("clip_cov_lb", 1.0, "cov_low", "clip_cov"),
            ("clip_cov_ub", 5.0, "cov_high", "clip_cov"),
            ("kl_cov_ratio", 0.0002, "cov_ratio", "kl_cov"),
            ("ppo_kl_coef", 0.1, "kl_coef", "kl_cov"),
        )
    ),
    *(
        _sets("policy", f"policy_loss.rollout_correction.{key}", default)
        for key, default in OF_BYPASS.items()
    ),
    Option(
        key="norm_adv_by_std_in_grpo",
        kind="advantage",
        default=True,
        sets=(Sets(("scale",), ("grpo", "pass_at_k"), Conversion(values={False: "none"})),),
    ),
    _sets("advantage", "gamma", 1.0, Sets(("gamma",))),
    _sets("advantage", "lam", 1.0, Sets(("lam",))),
    _sets("advantage", "gdpo_reward_keys", None),
    _sets("advantage", "gdpo_reward_weights", None),
    _sets("advantage", "use_pf_ppo", False),
    *(
        Option(
            key=key,
            kind=kind,
            default=default,
            objective="mode" if key == "loss_agg_mode" else "",
            effect=effect,
        )
        for kind, effect, defaults in ACTING
        for key, default in defaults.items()
    ),
)

# Of its functions; and the option that is read in place of two others.
NAMES = {**dict.fromkeys(("clip_ratio", "cliprange"), BOTH), "cliprange_low": LOW, "cliprange_high": HIGH}
# Of verl's options, from the root of its config.
DEFAULTS = {f"{TABLES[one.kind]}.{one.key}": one.default for one in OPTIONS} | {Key.TEMPERATURE: 1.0}
# The engines of verl's own classes of an actor's config, and where a reward's table of long responses stands.
ENGINES = ("FSDP", "Mcore", "TorchTitan", "VeOmni")
OVERLONG = (("reward_model", ""), ("reward_model.reward_kwargs", "_cfg"), ("reward.reward_kwargs", "_cfg"))
# What bears on the loss and has no field in Objective: the key, and its values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    Key.DISTILLATION: (None, False),
    Key.REJECTED: (None, False),
    f"{Key.CORRECTION}.loss_type": (None, "ppo_clip"),  # of verl's own loss bypass_mode
    "algorithm.kl_ctrl.type": (None, "fixed"),
    Key.FILTER_GROUPS: (None, False),
    # of the user's own: a class, a module that may register a loss, a trainer
    f"{Key.ACTOR}._target_": (None, *(f"verl.workers.config.{one}ActorConfig" for one in ENGINES)),
    "algorithm._target_": (None, "verl.trainer.config.AlgoConfig"),
    Key.EXTERNAL_LIB: (None, "", "composer_plugins.adapters.verl_plugin.register"),
    Key.TRAINER_MODE: (None, "sync", "composer_sync"),
    "trainer.v1.sampler.custom_sampler.path": (None, ""),  # it chooses the rows of a batch
    # a term of the model's own loss, and of the reward
    f"{Key.MODEL}.mtp.enable_train": (None, False),
    "algorithm.use_pf_ppo": (None, False),
    **{f"{table}.overlong_buffer{end}.enable": (None, False) for table, end in OVERLONG},
    f"{Key.ACTOR}.router_replay.mode": (None, "disabled"),
    f"{Key.ACTOR}.megatron.router_replay.mode": (None, "disabled"),
    f"{Key.ROLLOUT}.enable_rollout_routing_replay": (None, False),
    # what is sampled, and with which log-probabilities
    **{f"{Key.ROLLOUT}.{name}": values for name, values in SAMPLING.items()},
    f"{Key.ROLLOUT}.do_sample": (None, True),
    f"{Key.ROLLOUT}.use_fire_sampling": (None, False),
    f"{Key.ROLLOUT}.ignore_eos": (None, False),
    f"{Key.ROLLOUT}.over_sample_rate": (None, 0.0),
    f"{Key.ROLLOUT}.logprobs_mode": (None, "processed_logprobs"),
}


VERL = Framework(
    name="verl",
    title="verl",
    path="composer_plugins.adapters.verl_plugin.register:register",
    summary="verl's registries: estimators and policy losses; its trainer composer_sync: hint and replay",
    losses=(
        *(NamedLoss(row, {CHOOSES["policy"]: x}, mode=FORCED.get(x, "")) for x, row in LOSSES.items()),
        *(NamedLoss(row, {CHOOSES["advantage"]: name}, kind="advantage") for name, row in ESTIMATORS.items()),
        *(NamedLoss(row, {CHOOSES["kl"]: name}, kind="kl") for name, row in KL_ESTIMATORS.items()),
    ),
    denominators={mode: mode for mode in MODES},
    options=OPTIONS,
    tables=TABLES,
    names=NAMES,
    refuses={
        ("divergence", "uld"): "compares the largest probabilities of the whole vocabulary, and verl's "
        "processes send each other the teacher's largest entries only"
    },
    unavailable=UNAVAILABLE,
    provides={
        # without composer_sync verl's old_log_prob is the rollout policy's too, as in verl's own DPPO
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask"}
        ),
        "advantage": frozenset({"rewards", "group_ids", "lengths", "token_rewards", "mask"}),
        # of trainer_mode composer_sync; logits are the teacher's hint_top_k entries and a tail
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "mask"}
            | {"teacher_topk_logprobs", "teacher_topk_ids", "old_logprobs"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"}),
    },
    partial_batch={
        "policy": "verl cuts the batch into micro-batches",
        "preference": "it sorts the batch's pairs anew, so a pair's weight would go to another pair",
    },
    not_carried=NOT_CARRIED,
    marks=("actor_rollout_ref",),
    release="0.9.1",
    package="verl",
    install="pip install 'composer-plugins[verl]'",
    command_line="hydra",
    configs=("ppo_trainer", "ppo_megatron_trainer"),
    convention="composer_plugins.adapters.verl_plugin.convention:VERL",
    registry="composer_plugins.adapters.verl_plugin.convention:policy_losses",
    claims="composer_plugins.conformance.verl_claims.suite",
    doctor="composer_plugins.adapters.verl_plugin.doctor",
    migration="composer_plugins.adapters.verl_plugin.migration",
)

# By row, the mode in which verl always reduces it.
FORCED_MODES: dict[str, Any] = {one.row: one.mode for one in VERL.losses if one.mode}
