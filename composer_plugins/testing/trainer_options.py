"""The options of TRL's loss that `check_trainer` moves, and why it does not move the others."""

from typing import Any, NamedTuple


class Move(NamedTuple):
    """Another value of an option, and where the option acts."""

    values: tuple[Any, ...]  # the first that differs from the trainer's own is set
    beside: dict[str, Any] = {}  # options that must be set, in both runs
    loss_types: tuple[str, ...] = ()  # it acts with these alone; () is all


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# The options of TRL's loss that act on rows that are generated already.
MOVES: dict[str, Move] = {
    "epsilon": Move((0.05, 0.1), loss_types=CLIPPED),
    "epsilon_high": Move((0.05, 0.1), loss_types=(*CLIPPED, "cispo")),
    "delta": Move((1.21, 1.25), loss_types=CLIPPED),
    "sapo_temperature_pos": Move((1.7, 2.0), loss_types=("sapo",)),
    "sapo_temperature_neg": Move((1.7, 2.0), loss_types=("sapo",)),
    "vespo_k_pos": Move((1.5, 2.5), loss_types=("vespo",)),
    "vespo_lambda_pos": Move((1.5, 2.5), loss_types=("vespo",)),
    "vespo_k_neg": Move((1.5, 2.5), loss_types=("vespo",)),
    "vespo_lambda_neg": Move((1.5, 2.5), loss_types=("vespo",)),
    "loss_type": Move(("dr_grpo", "dapo")),
    "importance_sampling_level": Move(("sequence", "token"), loss_types=(*CLIPPED, "cispo", "sapo")),
    "beta": Move((0.1, 0.2)),
    "use_bias_correction_kl": Move((True, False), {"beta": 0.1}),
    "entropy_coef": Move((0.1, 0.2)),
    "off_policy_mask_threshold": Move((0.001, 0.002)),
    "top_entropy_quantile": Move((0.5, 0.6)),
    "temperature": Move((1.3, 1.4)),
    "max_completion_length": Move((), loss_types=("dr_grpo",)),  # its own value + 1
}
BEFORE = "it acts before the loss, and the check gives every run the same rows"
CUTS = "the checks of micro-batches and of steps_per_generation are about it"
WITH_VLLM = "it acts with vLLM alone"
CONTROL = "it changes the entropy's coefficient after a step, and the check does one step"
# Why the other options of TRL's loss are not moved.
NOT_MOVED = {
    **dict.fromkeys(("gradient_accumulation_steps", "per_device_train_batch_size"), CUTS),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "num_iterations"), CUTS),
    **dict.fromkeys(("scale_rewards", "reward_weights", "multi_objective_aggregation"), BEFORE),
    **dict.fromkeys(("mask_truncated_completions", "num_generations", "chat_template_kwargs"), BEFORE),
    **dict.fromkeys(("pad_to_multiple_of", "log_multimodal"), BEFORE),
    **dict.fromkeys(("num_generations_eval", "per_device_eval_batch_size"), "it acts in evaluation alone"),
    **dict.fromkeys(("use_vllm", "vllm_importance_sampling_correction"), WITH_VLLM),
    **dict.fromkeys(("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min"), WITH_VLLM),
    "vllm_importance_sampling_clip_max": WITH_VLLM,
    **dict.fromkeys(("use_adaptive_entropy", "entropy_target", "entropy_coef_delta"), CONTROL),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max"), CONTROL),
    "router_aux_loss_coef": "it acts with a mixture of experts alone",
    "cast_lm_head_to_fp32": "it changes the precision of the forward pass, not the loss",
    "gradient_checkpointing_kwargs": "it changes how the forward pass is computed, not what it gives",
}


def other_values(value: Any) -> list[Any]:
    """Values near this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    return [1.5 * value + 0.1] if isinstance(value, float) else []
