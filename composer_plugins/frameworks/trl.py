"""TRL: the options of GRPOConfig that its loss reads, and what each does beside a loss of ours."""

from typing import Any, NamedTuple

from composer_plugins.frameworks.contract import (
    MINUS_ONE,
    SAMPLING,
    Conversion,
    Framework,
    NamedLoss,
    Option,
    Sets,
)

# The releases that the adapter is tested with, by `nox -s trl_versions`. `conform` compares the last.
TESTED = ("1.9.0", "1.14.0", "1.16.0")

# TRL's loss_type: its row where importance_sampling_level is "token", and where it is "sequence"; what it is
# divided by. "bnpo" is a token mean over one micro-batch, so it depends on how the batch is cut.
# For a loss of ours `ComposerGRPOConfig._mode` decides the mode, and `PolicyChannel` reduces by it.
LOSS_TYPES: dict[str, tuple[str, str | None, str]] = {
    "grpo": ("grpo@trl", "gspo@trl", "seq-mean-token-mean"),
    "bnpo": ("grpo@trl", "gspo@trl", "bnpo"),
    "dr_grpo": ("dr_grpo@trl", "gspo@trl", "seq-mean-token-sum-norm"),
    "dapo": ("dapo@trl", "gspo@trl", "token-mean"),
    "luspo": ("grpo@trl", "luspo@trl", "seq-mean-token-sum"),
    "cispo": ("cispo@trl", None, "token-mean"),
    "sapo": ("sapo@trl", None, "seq-mean-token-mean"),
    "vespo": ("vespo@trl", "vespo@trl", "token-mean"),
}
OTHER_LOSSES = ("cispo", "sapo", "vespo")  # losses of their own, and no denominator of the clipped one
# The values of loss_type that are only a denominator, and the aggregation mode of each.
MODES = {name: mode for name, (_, _, mode) in LOSS_TYPES.items() if name not in OTHER_LOSSES}
OF_MODES = {mode: name for name, mode in MODES.items()}  # "token-sum" has none, and no KL
SEQUENCE_LEVEL = ("gspo", "luspo")  # TRL's importance_sampling_level="sequence"
# The values of vllm_importance_sampling_mode with one weight per token, which VESPO's weight is made of.
TOKEN_WEIGHTS = ("token_truncate", "token_mask")
MODES_IN_WORDS = {
    "seq-mean-token-mean": "the mean over completions of the mean over their tokens",
    "bnpo": "the mean over the tokens of one micro-batch",
    "seq-mean-token-sum-norm": "the mean over completions of their sum over tokens / max_completion_length",
    "token-mean": "the mean over all tokens of the whole batch",
    "seq-mean-token-sum": "the mean over completions of the sum over their tokens",
    "token-sum": "the sum over all tokens of the whole batch",
}

# The losses that clip the ratio, and those with a second clip above it.
CLIPPED = (
    *("ppo", "grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo", "opsm"),
    *("rec", "fipo", "aspo", "tvpo", "ce_gppo", "cpgd"),
)
CLIPPED_ELSEWHERE = ("gmpo", "minirl", "clip_cov")  # by the same bounds, in other trainers
CAPPED = ("ppo", "grpo", "dapo", "dr_grpo", "gspo", "luspo", "fipo")

CHOOSES = "it chooses the denominator; `cispo`, `sapo` and `vespo` are an error"
OWN_TERM = "as in TRL, which adds this term to the policy loss"
FACTOR = "as in TRL: it multiplies the policy loss of each token"
WEIGHTS = f"{FACTOR}; with `vespo` it enters the weight of the sequence"
BEFORE = "as in TRL, which applies it before any loss is computed"
DENOMINATOR = "as in TRL, where the denominator depends on it"
CORRECTED_KL = (
    "as in TRL; the ratio is of the sequence with `gspo` and `luspo`, and of the token with all others"
)
TEMPERATURE = "as in TRL, which divides the logits by it"
ADAPTIVE, WITH_VLLM = ("use_adaptive_entropy", True), ("use_vllm", True)
HEAD = "as in TRL; an error with the hint and replay channels"


def _sets(key: str, default: float, parameter: str, *losses: str) -> Option:
    return Option(key=key, default=default, sets=(Sets((parameter,), losses),))


def _acts(effect: str, only_with: tuple[str, Any] | None = None, **defaults: object) -> tuple[Option, ...]:
    """Options with the same effect, each with its default."""
    adds = effect in (CHOOSES, OWN_TERM)
    return tuple(
        Option(key=key, default=default, effect=effect, adds_a_term=adds, only_with=only_with)
        for key, default in defaults.items()
    )


# Every option that TRL reads for the loss of a batch: in `_compute_loss`, in the methods it calls, and in
# `_generate_and_score_completions` after the generation. A test reads this list and the defaults from TRL.
OPTIONS = (
    # Of TRL's own policy losses, and an error beside ours, with the parameters of ours that they are. Where
    # two of them set one parameter, the later one wins, as in TRL.
    Option(key="epsilon", default=0.2, sets=(Sets(("clip_low", "clip_high"), CLIPPED),)),
    # TRL caps the ratio of cispo at epsilon_high, and ours at 1 + clip_high.
    Option(
        key="epsilon_high",
        sets=(Sets(("clip_high",), CLIPPED), Sets(("clip_high",), ("cispo",), MINUS_ONE)),
    ),
    Option(key="delta", sets=(Sets(("ratio_cap",), CAPPED),)),
    _sets("sapo_temperature_pos", 1.0, "tau_pos", "sapo"),
    _sets("sapo_temperature_neg", 1.05, "tau_neg", "sapo"),
    _sets("vespo_k_pos", 2.0, "k_pos", "vespo"),
    _sets("vespo_lambda_pos", 3.0, "lambda_pos", "vespo"),
    _sets("vespo_k_neg", 3.0, "k_neg", "vespo"),
    _sets("vespo_lambda_neg", 2.0, "lambda_neg", "vespo"),
    *_acts(CHOOSES, loss_type="dapo"),
    Option(key="importance_sampling_level", default="token"),  # each loss of ours has its own
    # Of the other terms of TRL's loss.
    *_acts(OWN_TERM, beta=0.0),
    *_acts(CORRECTED_KL, use_bias_correction_kl=True),
    *_acts(OWN_TERM, entropy_coef=0.0, use_adaptive_entropy=False),
    *_acts(OWN_TERM, ADAPTIVE, entropy_target=0.2, entropy_coef_delta=0.005),
    *_acts(OWN_TERM, ADAPTIVE, entropy_coef_min=0.0, entropy_coef_max=1.0),
    *_acts(OWN_TERM, router_aux_loss_coef=None),
    # Factors and denominators.
    *_acts(FACTOR, off_policy_mask_threshold=None, top_entropy_quantile=1.0),
    *_acts(WEIGHTS, use_vllm=False),
    *_acts(WEIGHTS, WITH_VLLM, vllm_importance_sampling_correction=True),
    *_acts(WEIGHTS, WITH_VLLM, vllm_importance_sampling_mode="sequence_mask"),
    *_acts(WEIGHTS, WITH_VLLM, vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=3.0),
    *_acts(DENOMINATOR, max_completion_length=512, gradient_accumulation_steps=1, steps_per_generation=None),
    # Of the forward pass and of the batch.
    *_acts(TEMPERATURE, temperature=1.0),
    *_acts(HEAD, cast_lm_head_to_fp32=False),
    *_acts(
        BEFORE, scale_rewards="group", reward_weights=None, multi_objective_aggregation="sum_then_normalize"
    ),
    *_acts(BEFORE, mask_truncated_completions=False, num_generations=8, num_generations_eval=None),
    *_acts(BEFORE, num_iterations=1, generation_batch_size=None, per_device_train_batch_size=8),
    *_acts(BEFORE, per_device_eval_batch_size=8, pad_to_multiple_of="auto", chat_template_kwargs=None),
    *_acts(BEFORE, gradient_checkpointing_kwargs=None, log_multimodal=True),
)

LOSS_OPTIONS = {one.key: one for one in OPTIONS}

# Of SDPOConfig, IWOPDConfig and CPOConfig; GRPOTrainer splits `epsilon` in two.
NAMES = {
    "epsilon": (Sets(("clip_low", "clip_high"), CLIPPED_ELSEWHERE),),
    "epsilon_low": (Sets(("clip_low",), (*CLIPPED, *CLIPPED_ELSEWHERE)),),
    "epsilon_high": (Sets(("clip_high",), CLIPPED_ELSEWHERE),),
    "off_policy_mask_threshold": (Sets(("threshold",), ("opsm",)),),
    "iw_opd_gamma": (Sets(("gamma",), ("iw_opd",)),),
    "iw_opd_epsilon": (Sets(("eps",), ("iw_opd",)),),
    "distillation_topk": (Sets(("top_k",)),),
    "distillation_alpha": (Sets(("beta",), ("jsd",)), Sets(("alpha",), ("sdpo",))),
    "distillation_is_clip": (Sets(("ratio_cap",), ("sampled_token", "sdpo")),),
    "simpo_gamma": (Sets(("gamma_beta_ratio",), (), Conversion(text="simpo_gamma / beta")),),
}

# vllm_importance_sampling_mode as a correction of the catalogue, with its level and its bounds.
VLLM_WEIGHTS = {
    "token_truncate": ("tis", "token"),
    "sequence_truncate": ("tis", "sequence"),
    "token_mask": ("mis", "token"),
    "sequence_mask": ("mis", "sequence"),
}
VLLM_BOUNDS = {"tis": ("floor", "cap"), "mis": ("low", "high")}  # of clip_min and clip_max

# Options that change what is sampled, or what the model computes, with their values that change nothing.
NOT_CARRIED: dict[str, tuple[object, ...]] = {
    **SAMPLING,
    "generation_kwargs": (None, {}),
    "neftune_noise_alpha": (None, 0.0),
    "max_prompt_length": (None,),
}
# Options without a bearing on the loss, beside those of transformers' Trainer and of TRL's script and models:
# the rest of GRPOConfig, and names of earlier releases of these.
NO_BEARING = """
    cache_implementation disable_dropout ds3_gather_for_generation log_completions log_completions_hub_repo
    log_unique_prompts max_tool_calling_iterations model_init_kwargs num_completions_to_print shuffle_dataset
    transformers_continuous_batching_config trust_remote_code use_transformers_continuous_batching
    use_transformers_paged vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_guided_decoding_regex vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size

    datasets streaming test_split_size reward_model_name_or_path reward_funcs env config wandb_project
    accelerate_config wandb_entity wandb_run_group torch_dtype use_liger_loss wandb_log_unique_prompts

    adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics
    include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda num_input_tokens_seen
    overwrite_output_dir past_index per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id
    push_to_hub_organization push_to_hub_token ray_scope save_safetensors split_batches torchdynamo
    tpu_metrics_debug tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device warmup_ratio
"""

# Options that ComposerGRPOConfig does not have and that users of TRL write: by what they are, and by what to
# do, their names. A test reads those of the other trainers from TRL.
UP_TO = "TRL had it up to {}"
OF_ANOTHER = "it is an option of TRL's {}, whose trainer has another loss"
OURS_OTHERWISE = "it is no option"
IN_REPLAY, IN_HINT = "set {} in replay_params", "set {} in hint_params"
NO_VALUES = "remove it: GRPO has no value model"
IN_THE_DATA = "remove it, and leave pairs that are too long out of the data set"
EACH_BATCH = "remove it: the reference scores the pairs of each batch"
TEACHER = "remove it: the teacher of hints is made of the policy's own weights, by hint_teacher"
SAMPLED = "remove it: the policy samples every completion that is distilled"
INSTEAD: dict[str, dict[str, str]] = {
    UP_TO.format("0.27"): {
        "remove it, and shorten long prompts in the data set": "max_prompt_length max_prompt_len",
        "set use_liger_kernel": "use_liger_loss",
        "set vllm_structured_outputs_regex": "vllm_guided_decoding_regex",
    },
    UP_TO.format("0.26"): {"set log_unique_prompts": "wandb_log_unique_prompts"},
    UP_TO.format("0.17"): {
        "remove it; vllm_mode says where vLLM runs": "vllm_device vllm_dtype vllm_enable_prefix_caching",
        "set vllm_max_model_length": "vllm_max_model_len",
    },
    OF_ANOTHER.format("SDPOConfig and SDFTConfig"): {
        "set beta in hint_params of jsd, or alpha in those of sdpo": "distillation_alpha",
        IN_HINT.format("top_k"): "distillation_topk",
        IN_HINT.format("rest='tail'"): "distillation_add_tail",
        "set ratio_cap in hint_params of sampled_token or sdpo": "distillation_is_clip",
        "set hint_divergence='sampled_token', or 'sdpo' with top_k in hint_params": "distillation_mode",
        "set hint_divergence='sdpo'": "full_logit_distillation",
        "set hint_weight to it, and policy_weight to 1 - distillation_weight": "distillation_weight",
        "set hint_teacher": "teacher_model_kind teacher_regularization",
        "set hint_ema_rate": "teacher_update_rate ema_update_rate",
        "remove it: the ema teacher moves after every step": "teacher_sync_steps",
        TEACHER: "use_teacher_server",
        SAMPLED: "generate_from_teacher",
        "remove it, and return a hint_mask from a rollout_func": "num_loss_tokens_to_skip",
        "remove it": "diagnostics_warning_interval diagnostics_flat_tolerance",
    },
    OF_ANOTHER.format("DPOConfig"): {
        IN_REPLAY.format("label_smoothing"): "label_smoothing",
        IN_REPLAY.format("divergence"): "f_divergence_type",
        IN_REPLAY.format("alpha"): "f_alpha_divergence_coef",
        IN_REPLAY.format("tau of discopop"): "discopop_tau",
        "remove it: replay_loss is one loss": "loss_weights",
        "set replay_loss='rpo', and nll_weight in replay_params": "rpo_alpha",
        "remove it; the column n_teachers_agreeing has the weights of pairs": "use_weighting",
        "remove it: the replay loss scores whole completions": "ld_alpha",
        "set replay_loss='simpo', which needs no reference": "reference_free",
        EACH_BATCH: "precompute_ref_log_probs precompute_ref_batch_size",
        "remove it: the reference is the initial policy": (
            "force_use_ref_model ref_model_init_kwargs model_adapter_name ref_adapter_name"
        ),
        IN_THE_DATA: "truncation_mode max_target_length",
        "remove it": (
            "base_model_attribute_name generate_during_eval label_pad_token_id use_num_logits_to_keep "
            "use_logits_to_keep padding_free"
        ),
    },
    OF_ANOTHER.format("CPOConfig"): {
        IN_REPLAY.format("nll_weight of cpo or cpo_simpo"): "cpo_alpha",
        IN_REPLAY.format("gamma_beta_ratio to simpo_gamma / beta"): "simpo_gamma",
    },
    OF_ANOTHER.format("TPOConfig"): {
        IN_REPLAY.format("nll_weight of tpo or tpo_l"): "tpo_alpha",
        IN_REPLAY.format("gamma_beta_ratio to tpo_l_gamma / beta"): "tpo_l_gamma",
    },
    OF_ANOTHER.format("KTOConfig"): {
        "remove it; the column n_teachers_agreeing has the weights of pairs": (
            "desirable_weight undesirable_weight"
        ),
    },
    OF_ANOTHER.format("PPOConfig and RLOOConfig"): {
        NO_VALUES: "vf_coef cliprange_value lam",
        "set num_iterations": "num_ppo_epochs",
        "set steps_per_generation": "num_mini_batches",
        "set num_generations": "rloo_k",
        "set max_steps": "total_episodes",
        "remove it; scale_rewards says by what rewards are divided": "whiten_rewards normalize_advantages",
        "remove it, and clip in the reward function": "reward_clip_range",
        "remove it, and subtract it in the reward function": "missing_eos_penalty",
        "remove it: TRL's KL is one of tokens": "token_level_kl kl_estimator",
        "give the model and the reward functions to the trainer": "sft_model_path reward_model_path",
    },
    OF_ANOTHER.format("distillation trainers"): {
        SAMPLED: "lmbda seq_kd",
        TEACHER: (
            "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs "
            "teacher_model_server_url"
        ),
        IN_HINT.format("top_k"): "loss_top_k",
        IN_HINT.format("rest='tail'"): "loss_add_tail",
        "set hint_divergence": "distillation_objective",
        IN_HINT.format("top_k=1"): "reverse_kl_top_1_mode",
        "set gamma in policy_params of policy='iw_opd'": "iw_opd_gamma",
        "set eps in policy_params of policy='iw_opd'": "iw_opd_epsilon",
    },
    OF_ANOTHER.format("DPPOConfig"): {
        "set policy='dppo_tv' or 'dppo_kl'": "divergence_type",
        "remove it: dppo_topk_tv needs a top k that TRL does not have": "divergence_topk",
    },
    OURS_OTHERWISE: {
        "set max_completion_length": (
            "max_new_tokens response_length max_response_length completion_length generation_max_length"
        ),
        "set num_generations": "group_size n_generations num_return_sequences n_samples num_samples",
        "set per_device_train_batch_size": "batch_size micro_batch_size mini_batch_size train_batch_size",
        "set hint_ema_rate to 1 - it": "ema_decay hint_ema_decay teacher_ema_decay",
        "set hint_ema_rate": "ema_rate ema_alpha ema_tau",
        IN_HINT.format("beta"): "hint_beta jsd_beta",
        IN_HINT.format("temperature"): "hint_temperature kd_temperature",
        "set teacher_prompt_template": "hint_template",
        "set hint_divergence": "hint_loss hint_loss_type",
        "set hint_teacher": "teacher teacher_kind teacher_type",
        IN_REPLAY.format("beta"): "dpo_beta replay_beta simpo_beta",
        "set replay_loss": "replay_loss_type preference_loss",
        "set policy": "policy_loss policy_loss_type",
        "set epsilon, and epsilon_high too, which otherwise follows it": "epsilon_low clip_low",
        IN_THE_DATA: "max_length",
        "set use_liger_kernel": "use_liger",
        "set it in model_init_kwargs": "attn_implementation model_revision torch_dtype dtype",
        "give a LoraConfig to the trainer as peft_config": "use_peft lora_r lora_alpha lora_target_modules",
        "set gradient_checkpointing": "activation_offloading",
        "set num_completions_to_print": "num_sample_generations",
        "remove it": "dataset_num_proc pad_token padding_value is_encoder_decoder beta1 beta2",
    },
}


class Instead(NamedTuple):
    """An option that ComposerGRPOConfig does not have: what it is, and what to do."""

    problem: str
    remedy: str

    @property
    def is_former(self) -> bool:
        """Whether a former release of TRL had it."""
        return self.problem.startswith(UP_TO.partition("{")[0])

    @property
    def is_of_another_trainer(self) -> bool:
        """Whether a config with it is not one of a GRPOTrainer."""
        return self.problem.startswith(OF_ANOTHER.partition("{")[0])


NOT_OPTIONS = {
    name: Instead(problem, remedy)
    for problem, remedies in INSTEAD.items()
    for remedy, names in remedies.items()
    for name in names.split()
}
# TRL's names of preference losses, which no loss_type of GRPOConfig is: "sigmoid" is DPO's own loss.
DPO_LOSSES = """
    sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop
    sft sigmoid_norm simpo alphapo kto kto_pair
"""

# Trainers of TRL that the mixin cannot stand in front of, by name: why, and what to do.
SAMPLES_NOTHING = "it trains on stored completions and samples none, so it has no rewards, groups or rollouts"
DISTILLS = "it learns from another model, not from rewards, and makes its batches and its loss in its own way"
REPLAY_BESIDE = "derive it from trl.GRPOTrainer, and train on the pairs with replay_weight and replay_loss"
HINT_BESIDE = (
    "derive it from trl.GRPOTrainer, where the hint channel is a self-distillation beside the rewards"
)
OWN_TRAINER = "use it without the mixin"
NOT_GRPO: dict[str, tuple[str, str]] = {
    "RLOOTrainer": (
        "it is not a GRPOTrainer: its options are an RLOOConfig, it has the old policy's log-probability of "
        "a completion but not of each token, and it leaves gradient accumulation to the Trainer",
        "derive it from trl.GRPOTrainer with policy='rloo', scale_rewards='none' and "
        "policy_weight=G / (G - 1), where G is num_generations",
    ),
    "AsyncGRPOTrainer": (
        "it is not a GRPOTrainer: a child process makes rollouts and rewards, and the trainer gets packed "
        "tokens from a queue, without the rows that hold hints and pairs",
        "derive it from trl.GRPOTrainer, with vllm_mode='server' to generate on a server",
    ),
    "SDPOTrainer": (
        "its loss is a self-distillation of its own",
        "derive it from trl.GRPOTrainer with hint_source='successful_rollout', which is SDPO's hint",
    ),
    "SDFTTrainer": (
        "its loss is a self-distillation of its own",
        "derive it from trl.GRPOTrainer with hint_source='column', which is SDFT's hint",
    ),
    "A2POTrainer": (
        "it is a regression on one completion per prompt, without groups or log-probabilities per token",
        "derive it from trl.GRPOTrainer",
    ),
    "OnlineDPOTrainer": (
        "it compares two completions that it samples, without advantages",
        "derive it from trl.GRPOTrainer, and train on stored pairs with replay_weight and replay_loss",
    ),
    **dict.fromkeys(
        ("DPOTrainer", "KTOTrainer", "CPOTrainer", "ORPOTrainer", "TPOTrainer"),
        (SAMPLES_NOTHING, REPLAY_BESIDE),
    ),
    **dict.fromkeys(("SFTTrainer", "RewardTrainer"), (SAMPLES_NOTHING, OWN_TRAINER)),
    **dict.fromkeys(
        (
            "DistillationTrainer",
            "ServerDistillationTrainer",
            "AsyncDistillationTrainer",
            "GKDTrainer",
            "GOLDTrainer",
            "IWOPDTrainer",
        ),
        (DISTILLS, HINT_BESIDE),
    ),
}


class OwnPolicy(NamedTuple):
    """A subclass of GRPOTrainer in TRL whose policy loss is its own."""

    policy: str  # our name of this loss
    defaults: dict[str, float]  # the options whose defaults are its own


TRAINERS_WITH_A_POLICY = {"GMPOTrainer": OwnPolicy("gmpo", {"epsilon": 0.4})}


TRL = Framework(
    name="trl",
    title="TRL",
    path="composer_plugins.adapters.trl_mixin:ComposerGRPOTrainer",
    summary="TRL's GRPOTrainer with any policy loss, a hint channel and a replay channel",
    losses=tuple(
        NamedLoss(row, {"loss_type": name, "importance_sampling_level": level})
        for name, rows in LOSS_TYPES.items()
        for level, row in zip(("token", "sequence"), rows, strict=False)
        if row is not None
    ),
    denominators={name: mode for name, (_, _, mode) in LOSS_TYPES.items()},
    options=OPTIONS,
    names=NAMES,
    provides={
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "old_logprobs"}
            | {"mask"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"}),
    },
    partial_batch=dict.fromkeys(("policy", "preference"), "TRL cuts the batch into micro-batches"),
    not_carried=NOT_CARRIED,
    no_bearing=frozenset(NO_BEARING.split()),
    release=TESTED[-1],
    command_line="flags",
    config_flag="--config",
    package="trl",
    install="pip install 'composer-plugins[trl]'",
    convention="composer_plugins.adapters.trl_mixin.convention:TRL",
    claims="composer_plugins.conformance.trl_claims.suite",
    migration="composer_plugins.adapters.trl_mixin.migration",
)
