"""KL estimators, rollout corrections and aggregation modes."""

from functools import partial

from composer_plugins.losses.bundled.shared import (
    GRPO_LOSS,
    GRPO_SCORES,
    LOG_RATIO_CLAMP,
    SLIME_CLAIM,
    TINY,
    VERL_CLAIM,
    nemo_rl,
    oat,
    prime_rl,
    skyrl,
    trl,
    verl,
)
from composer_plugins.losses.row import Dialect, Loss, Parameter

NO_CAP = 3e38  # near the largest number of float32
REDUCED = ("token_loss", "mask")

HOSTS = "golden/test_policy_hosts.py::"
OPENRLHF = "OpenRLHF 0.11.2 openrlhf/models/loss.py PolicyLoss"
AREAL = "inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d apply_rejection_sampling"

KL_TESTS = "kernels/test_kl.py::"
KL_DEFINITION = KL_TESTS + "test_estimators_equal_the_definition"
KL_CORRECTED = KL_TESTS + "test_a_corrected_estimator_is_the_ratio_times_the_estimator"
SLIME_KL = "THUDM/slime@624b824 slime/utils/ppo_utils.py compute_approx_kl"
VERL_CLAMPS = {"log_ratio_clamp": 20.0, "value_clamp": 10.0}
CLAMPS = {
    "log_ratio_clamp": LOG_RATIO_CLAMP,
    "value_clamp": Parameter("clamp on the value, in nats; verl: 10.0", low=TINY),
}

# Fields that many rows share. A row may override them.
kl = partial(
    Loss,
    kind="kl",
    paper="http://joschu.net/blog/kl-approx.html",
    needs=("logprobs", "ref_logprobs", "mask"),
    proof=KL_DEFINITION,
)


def verl_kl(names: str, **params: float) -> Dialect:
    """A value of verl's kl_loss_type (and kl_penalty)."""
    return verl("kl_penalty", params=params, note=f"kl_loss_type {names}")


def nemo_kl(name: str) -> Dialect:
    """A value of NeMo-RL's reference_policy_kl_type."""
    note = f"reference_policy_kl_type {name}; kl_input_clamp_value is log_ratio_clamp, kl_output_clamp_value "
    note += "value_clamp; old is the policy itself, or the rollout engine with use_on_policy_kl_approximation"
    source = "NVIDIA-NeMo/RL nemo_rl/algorithms/utils.py@7ea279a calculate_kl"
    return nemo_rl(params=VERL_CLAMPS, source=source, proof=KL_CORRECTED, note=note)


def slime_kl(name: str, **params: float) -> Dialect:
    """A value of slime's kl_loss_type with use_unbiased_kl."""
    source = f"{SLIME_KL} (use_unbiased_kl)"
    note = f"kl_loss_type {name} with use_unbiased_kl, in float32"
    return Dialect(upstream="slime", params=params, source=source, proof=KL_CORRECTED, note=note)


corrected = partial(
    kl,
    paper="arXiv 2506.09477",
    needs=("logprobs", "old_logprobs", "ref_logprobs", "mask"),
    parameters=CLAMPS,
    proof=KL_CORRECTED,
)


def skyrl_kl(name: str, **params: float) -> Dialect:
    """A value of SkyRL's kl_estimator_type."""
    return skyrl("compute_approx_kl", params=params, note=f"kl_estimator_type {name}")


KL = (
    kl(
        name="k1",
        summary="the log-ratio: unbiased, of high variance; for the reward",
        dialects=(verl_kl("kl, k1"), skyrl_kl("k1")),
    ),
    kl(
        name="k2",
        summary="half the squared log-ratio: has the gradient of the KL",
        dialects=(verl_kl("mse, k2, k2+"), skyrl_kl("k2")),
    ),
    kl(
        name="k3",
        summary="unbiased, of low variance, never negative; GRPO's",
        parameters=CLAMPS,
        dialects=(
            verl_kl("low_var_kl, k3", **VERL_CLAMPS),
            skyrl_kl("k3, the default", **VERL_CLAMPS),
            trl(
                source=GRPO_LOSS,
                note="beta is its coefficient, 0.0 by default; use_bias_correction_kl is k3_corrected",
            ),
            Dialect(
                upstream="slime",
                params={"value_clamp": 10.0},
                source=SLIME_KL,
                proof=KL_TESTS + "test_estimator_equals_slime",
                note='kl_loss_type "low_var_kl", in float32; its "k3" has no clamp, and "k1" is its default',
            ),
        ),
    ),
    kl(
        name="k1_plus",
        gradient="surrogate",
        summary="the value of k1 with the gradient of k2",
        proof=KL_TESTS + "test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2",
        dialects=(verl_kl("k1+"),),
    ),
    kl(
        name="k3_plus",
        gradient="surrogate",
        summary="the value of k3 with the gradient of k2",
        parameters=CLAMPS,
        proof=KL_TESTS + "test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2",
        dialects=(verl_kl("k3+, low_var_kl+", **VERL_CLAMPS),),
    ),
    kl(
        name="abs",
        path="composer_plugins.kernels.kl:absolute",
        summary="the absolute log-ratio",
        dialects=(verl_kl("abs"), skyrl_kl("abs")),
    ),
    kl(
        name="squared",
        summary="the squared log-ratio, twice k2",
        paper="arXiv 2602.02276",
        dialects=(
            prime_rl(
                source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py default_loss_fn",
                proof=KL_DEFINITION,
                note="kl_tau is its coefficient, 1e-3; the other policy is the rollout's, not a reference",
            ),
        ),
    ),
    corrected(
        name="k1_corrected",
        summary="k1 times the ratio to the old policy: gradient of the KL",
        dialects=(nemo_kl("k1"), slime_kl("k1")),
    ),
    corrected(
        name="k2_corrected",
        summary="k2 times the ratio to the old policy",
        exceptions={
            "policies_far_apart_give_finite_numbers": "the square of 10,000 nats times a saturated ratio is "
            "beyond float32"
        },
        dialects=(nemo_kl("k2"), slime_kl("k2")),
    ),
    corrected(
        name="k3_corrected",
        summary="k3 times the ratio to the old policy: gradient of the KL",
        paper="arXiv 2512.02556",
        parameters={"level": Parameter("what one ratio belongs to", choices=("token", "sequence"))} | CLAMPS,
        dialects=(
            trl(
                source=f"{GRPO_LOSS} (use_bias_correction_kl)",
                note="on by default, with beta 0.0; importance_sampling_level is level",
            ),
            nemo_kl("k3"),
            slime_kl('"low_var_kl" (its "k3" has no clamp)', value_clamp=10.0),
        ),
    ),
)

LEVEL_HELP = "one weight per token, or per row: of the product or of the geometric mean of its ratios"
LEVELS = ("token", "sequence", "geometric")
WEIGHT_PARAMETERS = {
    "log_ratio_clamp": Parameter("clamp on the log weight, in nats; verl: 20.0", low=TINY),
    "normalise": Parameter("divide by the batch's mean weight", choices=(False, True)),
}
NORMALISED = {"nan_is_seen_in_its_row_and_in_no_other(normalise=True)": "divided by the batch's mean"}
SLIME_IS = "THUDM/slime@624b824 slime/backends/megatron_utils/loss.py"
VERL_WEIGHTS = "verl 0.9.1 trainer/ppo/rollout_corr_helper.py compute_rollout_correction_weights"
CORRECTION_TESTS = "kernels/test_corrections.py::"

correction = partial(
    Loss,
    kind="correction",
    needs=("old_logprobs", "rollout_logprobs", "mask"),
    proof=CORRECTION_TESTS + "test_weights_equal_loops",
)
verl_weights = partial(Dialect, upstream="verl", proof=VERL_CLAIM)
slime_weights = partial(Dialect, upstream="slime", proof=SLIME_CLAIM)
trl_weights = partial(trl, source=GRPO_SCORES)

CORRECTIONS = (
    correction(
        name="tis",
        summary="truncated importance sampling: the weight, capped",
        paper="https://fengyao.notion.site/off-policy-rl",
        parameters={
            "cap": Parameter("largest weight", low=TINY),
            "floor": Parameter("smallest weight", low=0),
            "level": Parameter(LEVEL_HELP, choices=LEVELS),
            **WEIGHT_PARAMETERS,
        },
        exceptions=NORMALISED,
        dialects=(
            Dialect(
                upstream="fireworks",
                params={"cap": 5.0},
                source="fw-ai/cookbook training/utils/rl/tis.py@76821fa compute_tis_weight",
                proof=HOSTS + "test_losses_equal_fireworks",
                note="on by default; level sequence is geometric; icepop_threshold t is icepop with 1 / t "
                "and t",
            ),
            Dialect(
                upstream="openrlhf",
                params={"cap": 5.0, "floor": 0.5},
                source=OPENRLHF,
                proof=HOSTS + "test_corrections_equal_openrlhf",
                note="is_correction_level token, is_correction_mode clip; is_correction_threshold is floor, "
                "cap",
            ),
            Dialect(
                upstream="areal",
                params={"cap": 5.0},
                source=AREAL,
                proof=HOSTS + "test_decoupled_ppo_equals_areal",
                note="rejection_sampling action clamp; upper, lower are cap, floor; level sequence is "
                "geometric; in float32",
            ),
            verl_weights(
                params={"cap": 2.0, "log_ratio_clamp": 20.0},
                source=VERL_WEIGHTS,
                note="rollout_is is level, and off (null) by default; rollout_is_threshold is cap",
            ),
            skyrl(
                "compute_tis_ratio",
                file="off_policy_correction_utils.py",
                params={"cap": 2.0, "log_ratio_clamp": 20.0},
                note="tis_ratio_type is level, and off (null) by default; token_tis_ratio_clip_high is cap, "
                "or with level sequence sequence_tis_ratio_clip_high (5.0)",
            ),
            trl_weights(
                params={"cap": 3.0},
                note="vllm_importance_sampling_mode token_truncate (or level sequence: sequence_truncate); "
                "clip_max is cap, clip_min is floor; the mode by default is sequence_mask: mis",
            ),
            nemo_rl(
                params={"cap": NO_CAP},
                note="use_importance_sampling_correction, off by default, alone is without a cap; with "
                "truncated_importance_sampling_type tis the _ratio is cap, which has no default, and the "
                "_ratio_min floor; level sequence with sequence_level_importance_ratios; an infinite or NaN "
                "weight is 0 there",
            ),
            slime_weights(
                params={"cap": 2.0, "floor": 0.0},
                source=f"{SLIME_IS} vanilla_tis_function",
                note="use_tis, off by default; tis_clip is cap, tis_clip_low floor",
            ),
        ),
    ),
    correction(
        name="mis",
        summary="masked importance sampling: the weight, 0 outside its bounds",
        paper="https://richardli.xyz/rl-collapse",
        parameters={
            "high": Parameter("a larger weight becomes 0; TRL: 3.0", low=TINY, example=2.0),
            "low": Parameter("a smaller weight becomes 0", low=0),
            "level": Parameter(LEVEL_HELP, choices=LEVELS),
            **WEIGHT_PARAMETERS,
        },
        exceptions=NORMALISED,
        dialects=(
            Dialect(
                upstream="areal",
                params={"high": 5.0, "level": "token"},
                source=AREAL,
                proof=HOSTS + "test_decoupled_ppo_equals_areal",
                note="rejection_sampling action mask with metric ratio; upper, lower are high, low; level "
                "sequence is geometric; a rejected token stays in the denominator; in float32",
            ),
            trl_weights(
                params={"high": 3.0, "level": "sequence"},
                note="vllm_importance_sampling_mode sequence_mask, the default with vLLM (level token: "
                "token_mask); clip_max is high, clip_min is low; a NaN log-probability counts as on-policy",
            ),
        ),
    ),
    correction(
        name="icepop",
        summary="per token, the weight, 0 outside a band around 1",
        paper="arXiv 2510.18855",
        parameters={
            "low": Parameter("a smaller weight becomes 0", low=0),
            "high": Parameter("a larger weight becomes 0", low=TINY),
            **WEIGHT_PARAMETERS,
        },
        exceptions=NORMALISED,
        dialects=(
            Dialect(
                upstream="openrlhf",
                params={"low": 0.5, "high": 5.0},
                source=OPENRLHF,
                proof=HOSTS + "test_corrections_equal_openrlhf",
                note="is_correction_level token, is_correction_mode mask, its default; "
                "is_correction_threshold is low, high; the level seq and the gates binary_kl and tv have "
                "no row",
            ),
            verl_weights(
                params={"low": 0.5, "high": 5.0, "log_ratio_clamp": 20.0},
                source=f"{VERL_WEIGHTS}; trainer/config/algorithm.py decoupled_token_icepop",
                note="the numbers of its preset decoupled_token_icepop, which sets rollout_is token and "
                'rollout_is_threshold "0.5_5.0"; rollout_is is off (null) by default; with rollout_is '
                "sequence it is mis",
            ),
            nemo_rl(
                note="truncated_importance_sampling_type icepop; the _ratio is high, the _ratio_min low; "
                "neither has a default (its comments name 0.5 and 5)"
            ),
            slime_weights(
                params={"low": 0.0, "high": 2.0},
                source=f"{SLIME_IS} icepop_function",
                note="custom_tis_function_path slime.backends.megatron_utils.loss.icepop_function with "
                "use_tis; "
                "tis_clip_low is low, tis_clip high",
            ),
        ),
    ),
    correction(
        name="seq_mask_tis",
        summary="the weight, where the sequence's geometric mean is in bounds",
        paper="https://richardli.xyz/rl-collapse",
        parameters={
            "low": Parameter("a sequence with a smaller mean weight gets 0", low=0, example=0.5),
            "high": Parameter("a sequence with a larger mean weight gets 0", low=TINY, example=2.0),
            **WEIGHT_PARAMETERS,
        },
        exceptions=NORMALISED,
        dialects=(
            nemo_rl(
                note="truncated_importance_sampling_type seq-mask-tis; the _ratio is high, the _ratio_min low"
            ),
        ),
    ),
)

NUM_SEQUENCES = Parameter("sequences of the whole batch; by default rows with an unmasked token", low=0)
AGGREGATION_TESTS = "kernels/test_aggregation.py::"
PRIME_RL_REDUCTION = "golden/test_prime_rl.py::test_reductions_equal_prime_rl"

skyrl_mode = partial(skyrl, "apply_loss_reduction_to_advantages_minibatch")
aggregation = partial(
    Loss, kind="aggregation", needs=REDUCED, proof=AGGREGATION_TESTS + "test_aggregate_equals_loops"
)
verl_mode = partial(verl, "agg_loss")
trl_mode = partial(trl, source=GRPO_LOSS)

AGGREGATIONS = (
    aggregation(
        name="token-mean",
        summary="the mean over unmasked tokens",
        paper="arXiv 2503.14476",
        parameters={
            "num_tokens": Parameter("unmasked tokens of the whole batch; by default of this mask", low=0)
        },
        dialects=(
            verl_mode(note="the default; batch_num_tokens and dp_size make the count global"),
            trl_mode(
                note="loss_type dapo (the default), cispo and vespo, where num_tokens is num_items_in_batch "
                "over the processes; loss_type bnpo, where it is the micro-batch's own"
            ),
            prime_rl(
                source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py compute_loss, train.py (rl_scale)",
                proof=PRIME_RL_REDUCTION,
                note="losses return a sum, divided by rl_scale: the tokens of all micro-batches and ranks, "
                "or 1",
            ),
            skyrl_mode(note="loss_reduction token_mean, the default; the tokens of a mini-batch"),
        ),
    ),
    aggregation(
        name="token-sum",
        summary="the sum over unmasked tokens; the caller divides",
        paper="arXiv 2503.14476",
        dialects=(
            verl_mode(note="times dp_size"),
            prime_rl(
                source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py default_loss_fn",
                proof=PRIME_RL_REDUCTION,
                note="what a loss function returns; compute_loss divides it by rl_scale, the global token "
                "count",
            ),
        ),
    ),
    aggregation(
        name="seq-mean-token-sum",
        summary="the mean over sequences of the sum over tokens",
        paper="arXiv 2602.05261",
        parameters={"num_sequences": NUM_SEQUENCES},
        dialects=(
            verl_mode(note="global_batch_size and dp_size make the count global"),
            trl_mode(
                denominators={"num_sequences": "rows"},
                note="loss_type luspo; rows without an unmasked token count",
            ),
        ),
    ),
    aggregation(
        name="seq-mean-token-mean",
        summary="the mean over sequences of the mean over tokens",
        paper="arXiv 2402.03300",
        parameters={"num_sequences": NUM_SEQUENCES},
        dialects=(
            verl_mode(
                note="global_batch_size and dp_size make the count global; with a float64 mask lengths are "
                "n + 1e-8"
            ),
            trl_mode(
                denominators={"num_sequences": "rows"},
                note="loss_type grpo and sapo; rows without an unmasked token count",
            ),
            oat(
                denominators={"num_sequences": "rows"},
                source="sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
                note="critic_type grpo",
            ),
            skyrl_mode(
                denominators={"num_sequences": "rows"},
                note="loss_reduction sequence_mean; rows without an unmasked token count",
            ),
        ),
    ),
    aggregation(
        name="seq-mean-token-sum-norm",
        summary="the mean over sequences of the token sum, over a constant",
        paper="arXiv 2503.20783",
        parameters={
            "max_length": Parameter("the constant, in tokens", low=1, example=4),
            "num_sequences": NUM_SEQUENCES,
        },
        dialects=(
            verl_mode(
                denominators={"max_length": "width"},
                note="loss_scale_factor is max_length; without it the padded width, which varies by batch",
            ),
            Dialect(
                upstream="verl<0.7.1",
                params={"num_sequences": 1},
                denominators={"max_length": "width"},
                source="verl 0.7.0 trainer/ppo/core_algos.py agg_loss (verl-project/verl@b178a3c)",
                proof=AGGREGATION_TESTS + "test_verl_before_0_7_1_does_not_divide_its_norm_by_sequences",
                note="not divided by the number of sequences, so it is larger by that factor; Stable-RL and "
                "SDPO do the same",
            ),
            trl_mode(
                params={"max_length": 512},
                denominators={"num_sequences": "rows"},
                note="loss_type dr_grpo; max_completion_length, 512 by default, is max_length",
            ),
            oat(
                params={"max_length": 512},
                denominators={"num_sequences": "rows"},
                source="sail-sg/oat@c1a074c oat/args.py, oat/algorithms/ppo.py PPOLearner; "
                "sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
                note="generate_max_length, 512 by default (53 in 2025-03), is max_length; critic_type "
                "drgrpo, its default",
            ),
            skyrl_mode(
                denominators={"num_sequences": "rows"},
                note="loss_reduction seq_mean_token_sum_norm; max_seq_len is max_length, and has no default",
            ),
        ),
    ),
    aggregation(
        name="prompt-mean",
        summary="the mean over prompts of the mean over their tokens",
        paper="no paper: NovaSky-AI/SkyRL",
        needs=(*REDUCED, "group_ids"),
        optional=("prompt_tokens",),
        parameters={
            "num_prompts": Parameter("prompts of the whole batch; by default the different group ids", low=0)
        },
        dialects=(
            skyrl_mode(
                note="loss_reduction prompt_mean (its default is token_mean); it scales the advantages of a "
                "mini-batch and sums the loss",
            ),
        ),
    ),
)

LOSSES = (*KL, *CORRECTIONS, *AGGREGATIONS)
