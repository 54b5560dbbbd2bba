"""TRL: the options of GRPOConfig that its loss reads, and what each does with our losses."""

from composer_plugins.frameworks import clips
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
# For our losses `ComposerGRPOConfig._mode` decides the mode, and `PolicyChannel` reduces by it.
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
MODES_IN_WORDS = {
    "seq-mean-token-mean": "the mean over completions of the mean over their tokens",
    "bnpo": "the mean over the tokens of one micro-batch",
    "seq-mean-token-sum-norm": "the mean over completions of their sum over tokens / max_completion_length",
    "token-mean": "the mean over all tokens of the whole batch",
    "seq-mean-token-sum": "the mean over completions of the sum over their tokens",
    "token-sum": "the sum over all tokens of the whole batch",
}

# The losses that clip the ratio, and those with a second clip above it.
CLIPPED_ELSEWHERE = ("gmpo", "minirl", "clip_cov")  # by the same bounds, in other trainers
CLIPPED = tuple(name for name in clips.CLIPPED if name not in CLIPPED_ELSEWHERE)
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
HEAD = "as in TRL; an error with the hint and replay channels"


def _sets(key: str, default: float, parameter: str, *losses: str) -> Option:
    return Option(key=key, default=default, sets=(Sets((parameter,), losses),))


def _acts(effect: str, **defaults: object) -> tuple[Option, ...]:
    """Options with the same effect, each with its default."""
    return tuple(Option(key=key, default=default, effect=effect) for key, default in defaults.items())


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
    Option(key="importance_sampling_level", default="token"),  # each of our losses has its own
    # Of the other terms of TRL's loss.
    *_acts(OWN_TERM, beta=0.0),
    *_acts(CORRECTED_KL, use_bias_correction_kl=True),
    *_acts(OWN_TERM, entropy_coef=0.0, use_adaptive_entropy=False),
    *_acts(OWN_TERM, entropy_target=0.2, entropy_coef_delta=0.005),
    *_acts(OWN_TERM, entropy_coef_min=0.0, entropy_coef_max=1.0),
    *_acts(OWN_TERM, router_aux_loss_coef=None),
    # Factors and denominators.
    *_acts(FACTOR, off_policy_mask_threshold=None, top_entropy_quantile=1.0),
    *_acts(WEIGHTS, use_vllm=False, vllm_importance_sampling_correction=True),
    *_acts(WEIGHTS, vllm_importance_sampling_mode="sequence_mask"),
    *_acts(WEIGHTS, vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=3.0),
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
    "epsilon_low": (Sets(("clip_low",), clips.CLIPPED),),
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
}

# Subclasses of GRPOTrainer in TRL that work with the channels and have a policy loss of their own, with the
# options whose defaults are their own.
OWN_POLICY: dict[str, dict[str, float]] = {"GMPOTrainer": {"epsilon": 0.4}}

_REWARDS = "TRL computes the advantages", "remove it, and set scale_rewards or reward_weights"
_VLLM = "TRL corrects for vLLM itself", "remove it"
UNAVAILABLE = {
    **dict.fromkeys(("advantage", "advantage_params"), _REWARDS),
    **dict.fromkeys(("rollout_correction", "rollout_correction_params"), _VLLM),
    "old_policy": ("TRL keeps the old policy's log-probabilities itself", "remove it"),
    "hint_estimator": ("sampled_token has it as a parameter", "set hint_params={'estimator': 'k2'}"),
    "hint_top_k": ("TRL compares whole distributions", "remove it, or set hint_params={'top_k': 100}"),
    "hint_t_start": ("TAID's t is constant here", "set hint_params={'t': 0.5}"),
}

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
    unavailable=UNAVAILABLE,
    provides={
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask"}
        ),
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "old_logprobs"}
            | {"mask"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"}),
    },
    partial_batch=dict.fromkeys(("policy", "preference"), "TRL cuts the batch into micro-batches"),
    not_carried=NOT_CARRIED,
    release=TESTED[-1],
    command_line="flags",
    config_flag="--config",
    package="trl",
    install="pip install 'composer-plugins[trl]'",
    convention="composer_plugins.adapters.trl_mixin.convention:TRL",
    claims="composer_plugins.conformance.trl_claims.suite",
    migration="composer_plugins.adapters.trl_mixin.migration",
)
