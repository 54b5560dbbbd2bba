"""slime: the arguments of its policy loss, which a launch script gives to train.py, and its advantages.

Read in THUDM/slime at 624b824: `slime/utils/arguments.py`, `slime/utils/ppo_utils.py`,
`slime/backends/megatron_utils/loss.py`, `slime/ray/rollout.py`. Miles (radixark/miles at 31f1ca9) is a fork
with the same arguments; it has no cispo. `composer-plugins conform slime --source DIR` compares slime's
losses, KL estimators and corrections with ours, by this table.
"""

from typing import Any

from composer_plugins.frameworks.clips import CLIPPED, DUAL
from composer_plugins.frameworks.contract import SAMPLING, Conversion, Framework, NamedLoss, Option, Sets
from composer_plugins.losses.row import Kind

ESTIMATOR, OPSM = "advantage_estimator", "use_opsm"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
ICEPOP_OF_MILES = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
STD, REWARDS = "disable_grpo_std_normalization", "disable_rewards_normalization"
BOUNDED = (*CLIPPED, "cispo")


def _policy(row: str, estimator: str, masked: bool = False) -> NamedLoss:
    return NamedLoss(row, {ESTIMATOR: estimator, OPSM: masked})


def _kl(row: str, kind: str, unbiased: bool = False, **params: float) -> NamedLoss:
    options = {"kl_loss_type": kind, "use_unbiased_kl": unbiased}
    return NamedLoss(row, options, params=params, kind="kl")


def _advantage(row: str, estimator: str, std_is_off: bool) -> NamedLoss:
    return NamedLoss(row, {ESTIMATOR: estimator, STD: std_is_off, REWARDS: False}, kind="advantage")


CLIPPING = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")  # the clip of PPO
LOSSES = (
    *(_policy("grpo@slime", estimator) for estimator in CLIPPING),
    _policy("gspo@slime", "gspo"),
    _policy("cispo@slime", "cispo"),
    *(_policy("opsm@slime", estimator, True) for estimator in CLIPPING),
    _kl("k1", "k1"),
    _kl("k2", "k2"),
    _kl("k3", "k3"),
    _kl("k3@slime", "low_var_kl"),
    _kl("k1_corrected@slime", "k1", True),
    _kl("k2_corrected@slime", "k2", True),
    NamedLoss("k3_corrected", {"kl_loss_type": "k3", "use_unbiased_kl": True}, kind="kl"),
    _kl("k3_corrected@slime", "low_var_kl", True),
    NamedLoss("tis@slime", {"use_tis": True, "custom_tis_function_path": None}, kind="correction"),
    NamedLoss("icepop@slime", {"use_tis": True, "custom_tis_function_path": ICEPOP}, kind="correction"),
    NamedLoss(
        "icepop@slime", {"use_tis": True, "custom_tis_function_path": ICEPOP_OF_MILES}, kind="correction"
    ),
    *(_advantage("grpo@slime", one, False) for one in ("grpo", "gspo", "cispo")),
    *(_advantage("dr_grpo", one, True) for one in ("grpo", "gspo", "cispo")),
)


def _option(key: str, default: Any, *sets: Sets, kind: Kind = "policy", **fields: Any) -> Option:
    return Option(key=key, default=default, sets=sets, kind=kind, **fields)


MODES = {False: "seq-mean-token-mean", True: "token-mean"}
OPTIONS = (
    _option("eps_clip", 0.2, Sets(("clip_low", "clip_high"), BOUNDED)),
    _option("eps_clip_high", None, Sets(("clip_high",), BOUNDED)),
    _option("eps_clip_c", None, *DUAL),
    _option("opsm_delta", 1e-4, Sets(("threshold",), ("opsm",))),
    _option("calculate_per_token_loss", False, objective="mode", conversion=Conversion(values=MODES)),
    _option(
        "use_rollout_logprobs",
        False,
        objective="old",
        conversion=Conversion(values={False: "trainer", True: "rollout engine"}),
    ),
    # The drift of opsm is that from the old policy, whichever that is.
    _option(
        OPSM,
        False,
        objective="rollout",
        conversion=Conversion(values={False: "rollout engine", True: "trainer"}),
    ),
    _option("entropy_coef", 0.0, objective="entropy"),
    _option("use_kl_loss", False, adds_a_term=True, effect="adds a KL to the loss"),
    _option("kl_loss_coef", 0.0, objective="kl.weight", only_with=("use_kl_loss", True)),
    _option("kl_loss_type", "k1", kind="kl", effect="chooses the KL"),
    _option("use_unbiased_kl", False, kind="kl", effect="multiplies the KL by the ratio"),
    _option("use_tis", False, kind="correction", effect="switches the correction on"),
    _option("custom_tis_function_path", None, kind="correction", effect="chooses the correction"),
    _option("tis_clip", 2.0, Sets(("cap",)), Sets(("high",)), kind="correction"),
    _option("tis_clip_low", 0.0, Sets(("floor",)), Sets(("low",)), kind="correction"),
    _option(STD, False, kind="advantage", effect="leaves the deviation out"),
    _option(REWARDS, False, kind="advantage", effect="leaves the rewards as they are"),
    _option("n_samples_per_prompt", 1, objective="group_size"),
    _option("rollout_temperature", 1.0, objective="temperature"),
)

# What bears on the loss and has no field in an Objective, with the values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "loss_type": (None, "policy_loss", "custom_loss", "sft_loss"),  # the adapter's Surface looks at it
    "composer": (None, {}),  # our own options: the adapter reads them
    "kl_coef": (None, 0, 0.0),
    "normalize_advantages": (None, False),
    "use_opd": (None, False),
    "mask_offpolicy_in_partial_rollout": (None, False),
    "dynamic_sampling_filter_path": (None,),
    "custom_advantage_function_path": (None,),
    "custom_pg_loss_reducer_function_path": (None,),
    "custom_reward_post_process_path": (None,),
    "custom_convert_samples_to_train_data_path": (None,),
    "rollout_sample_filter_path": (None,),
    "moe_aux_loss_coeff": (None, 0, 0.0),
    "loss_mask_type": (None,),
    "ref_update_interval": (None,),
    "use_routing_replay": (None, False),
    "use_rollout_routing_replay": (None, False),
    "enable_mtp_training": (None, False),
    **{f"rollout_{name}": values for name, values in SAMPLING.items()},
}
# Arguments without a bearing on the policy loss: slime's, Megatron's and SGLang's of its own scripts.
NO_BEARING = """
    accumulate_allreduce_grads_in_fp32 actor_num_gpus_per_node actor_num_nodes adam_beta1 adam_beta2
    add_qkv_bias allgather_cp apply_chat_template apply_chat_template_kwargs apply_layernorm_1p async_save
    attention_backend attention_dropout attention_output_gate attention_softmax_in_fp32 balance_by_flops
    balance_data bf16 buffer_filter_path check_for_nan_in_loss_and_grad check_weight_update_equal
    ci_disable_kl_checker ci_load_grad_norm ci_save_grad_norm ci_test
    ci_train_rollout_logprob_abs_diff_threshold clip_grad colocate context_parallel_size custom_config_path
    custom_eval_rollout_log_function_path custom_generate_function_path custom_loss_function_path
    custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path
    custom_megatron_init_path custom_model_provider_path custom_rm_path custom_rollout_log_function_path
    custom_update_weight_post_write_path data_pad_size_multiplier data_source_path debug_rollout_only
    debug_train_only decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers deterministic_mode
    disable_bias_linear disable_compute_advantages_and_returns disable_rollout_global_dataset
    disable_wandb_random_suffix distributed_backend distributed_timeout_minutes dump_details
    enable_experimental eval_config eval_function_path eval_input_key eval_interval eval_label_key
    eval_max_context_len eval_max_prompt_len eval_max_response_len eval_min_new_tokens eval_prompt_data
    eval_reward_key eval_temperature eval_tool_key eval_top_k eval_top_p expert_model_parallel_size
    expert_tensor_parallel_size ffn_hidden_size fp8_format fp8_param_gather fp8_recipe freeze_indexer
    freeze_params_name_list gamma get_mismatch_metrics global_batch_size gradient_accumulation_fusion
    group_query_attention group_rm hf_checkpoint hidden_dropout hidden_size http_proxy input_key
    keep_old_actor kv_channels kv_lora_rank label_key lambd load load_debug_rollout_data
    load_debug_rollout_data_subsample load_forge_rollout_data log_correct_samples log_multi_turn
    log_passrate log_probs_chunk_size log_probs_max_tokens_per_gpu log_reward_category lr lr_decay_style
    lr_warmup_fraction make_vocab_size_divisible_by masked_softmax_fusion max_position_embeddings
    max_tokens_per_gpu megatron_config_path megatron_deepgemm_forward_layers
    megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers
    megatron_deepgemm_moe_forward_modules memory_recorder memory_snapshot_dir memory_snapshot_num_steps
    metadata_key micro_batch_size min_lr model_name moe_enable_deepep moe_ffn_hidden_size moe_grouped_gemm
    moe_layer_freq moe_permute_fusion moe_router_bias_update_rate moe_router_dtype
    moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
    moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_scaling_factor
    moe_shared_expert_gate moe_shared_expert_intermediate_size moe_token_dispatcher_type
    moe_token_drop_policy mscale mscale_all_dim mtp_loss_scaling_factor mtp_num_layers
    multi_latent_attention multimodal_keys n_samples_per_eval_prompt no_check_for_nan_in_loss_and_grad
    no_gradient_accumulation_fusion no_masked_softmax_fusion no_position_embedding no_rope_fusion
    no_save_optim norm_epsilon normalization num_attention_heads num_critic_only_steps num_epoch num_experts
    num_gpus_per_node num_layers num_query_groups num_rollout num_steps_per_rollout offload offload_rollout
    offload_train only_train_params_name_list opd_kl_coef opd_teacher_ckpt_step opd_teacher_load opd_type
    optimizer optimizer_cpu_offload over_sampling_batch_size overlap_cpu_optimizer_d2h_h2d padded_vocab_size
    partial_rollout pipeline_model_parallel_size position_embedding position_embedding_type
    post_mlp_layernorm post_self_attn_layernorm prefill_num_servers profile_target prompt_data q_lora_rank
    qk_head_dim qk_layernorm qk_pos_emb_head_dim qkv_format qwen_gdn_backend recompute_granularity
    recompute_loss_function recompute_method recompute_num_layers record_memory_history ref_ckpt_step
    ref_load release_train reset_optimizer_states reward_key rm_type rm_url rollout_all_samples_process_path
    rollout_batch_size rollout_buffer_url rollout_data_postprocess_path rollout_data_transport
    rollout_external_engine_addrs rollout_function_path rollout_health_check_first_wait
    rollout_health_check_interval rollout_health_check_timeout rollout_max_context_len
    rollout_max_prompt_len rollout_max_response_len rollout_num_gpus rollout_num_gpus_per_engine
    rollout_sample_hook_path rollout_seed rollout_shuffle rollout_skip_special_tokens rollout_stop
    rollout_stop_token_ids rope_fusion rotary_base rotary_interleaved rotary_percent rotary_scaling_factor
    save save_debug_rollout_data save_debug_train_data save_hf save_interval seed seq_length
    sequence_parallel sglang_attention_backend sglang_chunked_prefill_size sglang_config
    sglang_cuda_graph_bs sglang_cuda_graph_max_bs sglang_custom_pull_weights_pre_read_hook
    sglang_deepep_mode sglang_disable_overlap_schedule sglang_disable_radix_cache
    sglang_disaggregation_ib_device sglang_disaggregation_transfer_backend sglang_dp_size
    sglang_enable_deterministic_inference sglang_enable_dp_attention sglang_enable_dp_lm_head sglang_ep_size
    sglang_expert_parallel_size sglang_kv_cache_dtype sglang_mamba_scheduler_strategy
    sglang_max_running_requests sglang_mem_fraction_static sglang_moe_a2a_backend sglang_moe_dense_tp_size
    sglang_nsa_decode_backend sglang_nsa_prefill_backend sglang_page_size sglang_reasoning_parser
    sglang_server_concurrency sglang_speculative_algorithm sglang_speculative_draft_attention_backend
    sglang_speculative_eagle_topk sglang_speculative_num_draft_tokens sglang_speculative_num_steps
    sglang_tool_call_parser sglang_watchdog_timeout skip_eval_before_train spec start_rollout_id swiglu
    tb_experiment_name tb_project_name tensor_model_parallel_size tool_key train_backend train_env_vars
    transformer_impl untie_embeddings_and_output_weights update_weight_buffer_size
    update_weight_delta_checksum update_weight_delta_encoding update_weight_disk_dir
    update_weight_disk_keep_files update_weight_local_checkpoint_dir update_weight_mode
    update_weight_transport update_weights_interval use_distributed_optimizer use_distributed_post
    use_dynamic_batch_size use_fault_tolerance use_gated_attention use_precision_aware_optimizer
    use_rollout_entropy use_rope_scaling use_rotary_position_embeddings use_stateless_adam use_tensorboard
    use_wandb v_head_dim value_clip vocab_size wandb_always_use_train_step wandb_dir wandb_group wandb_host
    wandb_key wandb_mode wandb_project wandb_run_id wandb_team weight_decay
    """

SLIME = Framework(
    name="slime",
    title="slime",
    summary="a function for --custom-loss-function-path, in Miles too",
    path="composer_plugins.adapters.slime_loss:loss_fn",
    release="624b824",
    losses=LOSSES,
    denominators={"false": "seq-mean-token-mean", "true": "token-mean"},  # of calculate_per_token_loss
    options=OPTIONS,
    provides={
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"entropies", "mask"}
        ),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "old_logprobs", "mask"}),
    },
    partial_batch={"policy": "slime cuts the batch into micro-batches"},
    not_carried=NOT_CARRIED,
    no_bearing=frozenset(NO_BEARING.split()),
    marks=("eps_clip_c", "calculate_per_token_loss", "n_samples_per_prompt", "rollout_temperature"),
    command_line="flags",
    config_flag="--custom-config-path",
    file_wins=True,
    install="git clone https://github.com/THUDM/slime and add --source slime; no pip install is needed",
    convention="composer_plugins.testing.conventions.global_counts:SLIME",
    claims="composer_plugins.conformance.slime_claims.suite",
    migration="composer_plugins.adapters.slime_loss.migration",
)
