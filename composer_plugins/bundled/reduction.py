"""KL estimators, rollout corrections and aggregation modes."""

from functools import partial
from typing import Any

from composer_plugins.bundled.shared import LOG_RATIO_CLAMP, TINY
from composer_plugins.catalogue import Dialect, Loss, Parameter

kl, correction = partial(Loss, kind="kl"), partial(Loss, kind="correction")

TOKENS = ("logprobs", "ref_logprobs", "mask")
WEIGHTS = ("old_logprobs", "rollout_logprobs", "mask")
REDUCED = ("token_loss", "mask")
SCHULMAN = "http://joschu.net/blog/kl-approx.html"

VERL_KL = "verl 0.9.1 trainer/ppo/core_algos.py kl_penalty"
KL_GOLDEN = "kernels/test_kl.py::test_estimator_equals_verl"
KL_DEFINITION = "kernels/test_kl.py::test_estimators_equal_the_definition"
VERL_CLAMPS = {"log_ratio_clamp": 20.0, "value_clamp": 10.0}
CLAMPS = {
    "log_ratio_clamp": LOG_RATIO_CLAMP,
    "value_clamp": Parameter("clamp on the value, in nats; verl: 10.0", low=TINY),
}
NOT_INSTALLABLE = "no reference obtainable: the loss is inside a trainer that needs GPUs to import"


def verl_kl(names: str, **params: float) -> Dialect:
    """A value of verl's kl_loss_type (and kl_penalty)."""
    return Dialect(
        upstream="verl", params=params, source=VERL_KL, proof=KL_GOLDEN, note=f"kl_loss_type {names}"
    )


KL = (
    kl(
        name="k1",
        summary="the log-ratio: unbiased, of high variance; for the reward",
        paper=SCHULMAN,
        needs=TOKENS,
        proof=KL_DEFINITION,
        dialects=(verl_kl("kl, k1"),),
    ),
    kl(
        name="k2",
        summary="half the squared log-ratio: has the gradient of the KL",
        paper=SCHULMAN,
        needs=TOKENS,
        proof=KL_DEFINITION,
        dialects=(verl_kl("mse, k2, k2+"),),
    ),
    kl(
        name="k3",
        summary="unbiased, of low variance, never negative; GRPO's",
        paper=SCHULMAN,
        needs=TOKENS,
        parameters=CLAMPS,
        proof=KL_DEFINITION,
        dialects=(
            verl_kl("low_var_kl, k3", **VERL_CLAMPS),
            Dialect(
                upstream="trl",
                source="TRL 1.16 trainer/grpo_trainer.py _compute_loss",
                proof="kernels/test_kl.py::test_k3_equals_trl_as_written",
                note="beta is its coefficient, 0.0 by default; use_bias_correction_kl is k3_corrected",
            ),
            Dialect(
                upstream="slime",
                params={"value_clamp": 10.0},
                source="THUDM/slime@624b824 slime/utils/ppo_utils.py compute_approx_kl",
                proof=NOT_INSTALLABLE,
                note='kl_loss_type "low_var_kl"; its "k3" has no clamp',
            ),
        ),
    ),
    kl(
        name="k1_plus",
        gradient="surrogate",
        summary="the value of k1 with the gradient of k2",
        paper=SCHULMAN,
        needs=TOKENS,
        proof="kernels/test_kl.py::test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2",
        dialects=(verl_kl("k1+"),),
    ),
    kl(
        name="k3_plus",
        gradient="surrogate",
        summary="the value of k3 with the gradient of k2",
        paper=SCHULMAN,
        needs=TOKENS,
        parameters=CLAMPS,
        proof="kernels/test_kl.py::test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2",
        dialects=(verl_kl("k3+, low_var_kl+", **VERL_CLAMPS),),
    ),
    kl(
        name="abs",
        path="composer_plugins.kernels.kl:absolute",
        summary="the absolute log-ratio",
        paper=SCHULMAN,
        needs=TOKENS,
        proof=KL_DEFINITION,
        dialects=(verl_kl("abs"),),
    ),
    kl(
        name="squared",
        summary="the squared log-ratio, twice k2",
        paper="arXiv 2602.02276",
        needs=TOKENS,
        proof=KL_DEFINITION,
        dialects=(
            Dialect(
                upstream="prime-rl",
                source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py default_loss_fn",
                proof=KL_DEFINITION,
                note="kl_tau is its coefficient, 1e-3; the other policy is the rollout's, not a reference",
            ),
        ),
    ),
    kl(
        name="k3_corrected",
        summary="k3 times the ratio to the old policy: off-policy, has the gradient of the KL",
        paper="arXiv 2512.02556",
        needs=("logprobs", "old_logprobs", "ref_logprobs", "mask"),
        parameters={
            "level": Parameter("what one ratio belongs to", choices=("token", "sequence")),
        },
        proof="kernels/test_kl.py::test_k3_corrected_equals_trl_as_written",
        dialects=(
            Dialect(
                upstream="trl",
                source="TRL 1.16 trainer/grpo_trainer.py _compute_loss (use_bias_correction_kl)",
                proof="kernels/test_kl.py::test_k3_corrected_equals_trl_as_written",
                note="on by default, with beta 0.0; importance_sampling_level is level",
            ),
        ),
    ),
)

LEVEL_HELP = "one weight per token, or per row: of the product or of the geometric mean of its ratios"
LEVELS = ("token", "sequence", "geometric")
WEIGHT_PARAMETERS = {
    "log_ratio_clamp": Parameter("clamp on the log weight, in nats; verl: 20.0", low=TINY),
    "normalise": Parameter("divide by the batch's mean weight", choices=(False, True)),
}
VERL_WEIGHTS = "verl 0.9.1 trainer/ppo/rollout_corr_helper.py compute_rollout_correction_weights"
TRL_WEIGHTS = "TRL 1.16 trainer/grpo_trainer.py _generate_and_score_completions"
PROVEN = "kernels/test_corrections.py::"

CORRECTIONS = (
    correction(
        name="tis",
        summary="truncated importance sampling: the weight, capped",
        paper="https://fengyao.notion.site/off-policy-rl",
        needs=WEIGHTS,
        parameters={
            "cap": Parameter("largest weight", low=TINY),
            "floor": Parameter("smallest weight", low=0),
            "level": Parameter(LEVEL_HELP, choices=LEVELS),
            **WEIGHT_PARAMETERS,
        },
        proof=PROVEN + "test_weights_equal_loops",
        dialects=(
            Dialect(
                upstream="verl",
                params={"cap": 2.0, "log_ratio_clamp": 20.0},
                source=VERL_WEIGHTS,
                proof=PROVEN + "test_weights_equal_verl_as_written",
                note="rollout_is is level, and off (null) by default; rollout_is_threshold is cap",
            ),
            Dialect(
                upstream="trl",
                params={"cap": 3.0},
                source=TRL_WEIGHTS,
                proof=PROVEN + "test_weights_equal_trl_as_written",
                note="vllm_importance_sampling_mode token_truncate (or level sequence: sequence_truncate); "
                "clip_max is cap, clip_min is floor; the mode by default is sequence_mask: mis",
            ),
        ),
    ),
    correction(
        name="mis",
        summary="masked importance sampling: the weight, 0 outside its bounds",
        paper="https://richardli.xyz/rl-collapse",
        needs=WEIGHTS,
        parameters={
            "high": Parameter("a larger weight becomes 0; TRL: 3.0", low=TINY, example=2.0),
            "low": Parameter("a smaller weight becomes 0", low=0),
            "level": Parameter(LEVEL_HELP, choices=LEVELS),
            **WEIGHT_PARAMETERS,
        },
        proof=PROVEN + "test_weights_equal_loops",
        dialects=(
            Dialect(
                upstream="trl",
                params={"high": 3.0, "level": "sequence"},
                source=TRL_WEIGHTS,
                proof=PROVEN + "test_weights_equal_trl_as_written",
                note="vllm_importance_sampling_mode sequence_mask, the default with vLLM (level token: "
                "token_mask); clip_max is high, clip_min is low; a NaN log-probability counts as on-policy",
            ),
        ),
    ),
    correction(
        name="icepop",
        summary="per token, the weight, 0 outside a band around 1",
        paper="arXiv 2510.18855",
        needs=WEIGHTS,
        parameters={
            "low": Parameter("a smaller weight becomes 0", low=0),
            "high": Parameter("a larger weight becomes 0", low=TINY),
            "log_ratio_clamp": WEIGHT_PARAMETERS["log_ratio_clamp"],
            "normalise": WEIGHT_PARAMETERS["normalise"],
        },
        proof=PROVEN + "test_weights_equal_loops",
        dialects=(
            Dialect(
                upstream="verl",
                params={"low": 0.5, "high": 5.0, "log_ratio_clamp": 20.0},
                source=f"{VERL_WEIGHTS}; trainer/config/algorithm.py decoupled_token_icepop",
                proof=PROVEN + "test_weights_equal_verl_as_written",
                note="the numbers of its preset decoupled_token_icepop, which sets rollout_is token and "
                'rollout_is_threshold "0.5_5.0"; rollout_is is off (null) by default; with rollout_is '
                "sequence it is mis",
            ),
        ),
    ),
)

NUM_TOKENS = Parameter("unmasked tokens of the whole batch; by default of this mask", low=0)
NUM_SEQUENCES = Parameter("sequences of the whole batch; by default rows with an unmasked token", low=0)
AGG = "verl 0.9.1 trainer/ppo/core_algos.py agg_loss"
TRL_LOSS = "TRL 1.16 trainer/grpo_trainer.py _compute_loss"
IN = "kernels/test_aggregation.py::"
LOOPS, VERL_EQUAL = IN + "test_aggregate_equals_loops", IN + "test_aggregate_equals_verl"
TRL_EQUAL = IN + "test_trl_dialects_equal_its_arithmetic"
OAT_EQUAL = "golden/test_policy.py::test_grpo_and_dr_grpo_equal_oat"
GLOBAL = "batch_num_tokens and dp_size make the count global"
GLOBAL_ROWS = "global_batch_size and dp_size make the count global; with a float64 mask lengths are n + 1e-8"


def mode(
    name: str, summary: str, paper: str, parameters: dict[str, Parameter], *dialects: Dialect, **inputs: Any
) -> Loss:
    """The row of one aggregation mode."""
    return Loss(
        name=name,
        kind="aggregation",
        summary=summary,
        paper=paper,
        parameters=parameters,
        proof=LOOPS,
        dialects=dialects,
        **{"needs": REDUCED, **inputs},
    )


AGGREGATIONS = (
    mode(
        "token-mean",
        "the mean over unmasked tokens",
        "arXiv 2503.14476",
        {"num_tokens": NUM_TOKENS},
        Dialect(upstream="verl", source=AGG, proof=VERL_EQUAL, note=f"the default; {GLOBAL}"),
        Dialect(
            upstream="trl",
            source=TRL_LOSS,
            proof=TRL_EQUAL,
            note="loss_type dapo (the default), cispo and vespo, where num_tokens is num_items_in_batch over "
            "the processes; loss_type bnpo, where it is the micro-batch's own",
        ),
        Dialect(
            upstream="prime-rl",
            source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py compute_loss, train.py (rl_scale)",
            proof="no reference obtainable: the count is of PRIME-RL's distributed training loop",
            note="losses return a sum, divided by rl_scale: the tokens of all micro-batches and ranks, or 1",
        ),
    ),
    mode(
        "token-sum",
        "the sum over unmasked tokens; the caller divides",
        "arXiv 2503.14476",
        {},
        Dialect(upstream="verl", source=AGG, proof=VERL_EQUAL, note="times dp_size"),
        Dialect(
            upstream="prime-rl",
            source="PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py default_loss_fn",
            proof="no reference obtainable: the sum is a line of PRIME-RL's distributed training loop",
            note="what a loss function returns; compute_loss divides it by rl_scale, the global token count",
        ),
    ),
    mode(
        "seq-mean-token-sum",
        "the mean over sequences of the sum over tokens",
        "arXiv 2602.05261",
        {"num_sequences": NUM_SEQUENCES},
        Dialect(upstream="verl", source=AGG, proof=VERL_EQUAL, note=GLOBAL_ROWS.partition(";")[0]),
        Dialect(
            upstream="trl",
            denominators={"num_sequences": "rows"},
            source=TRL_LOSS,
            proof=TRL_EQUAL,
            note="loss_type luspo; rows without an unmasked token count",
        ),
    ),
    mode(
        "seq-mean-token-mean",
        "the mean over sequences of the mean over tokens",
        "arXiv 2402.03300",
        {"num_sequences": NUM_SEQUENCES},
        Dialect(upstream="verl", source=AGG, proof=VERL_EQUAL, note=GLOBAL_ROWS),
        Dialect(
            upstream="trl",
            denominators={"num_sequences": "rows"},
            source=TRL_LOSS,
            proof=TRL_EQUAL,
            note="loss_type grpo and sapo; rows without an unmasked token count",
        ),
        Dialect(
            upstream="oat",
            denominators={"num_sequences": "rows"},
            source="sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
            proof=OAT_EQUAL,
            note="critic_type grpo",
        ),
    ),
    mode(
        "seq-mean-token-sum-norm",
        "the mean over sequences of the sum over tokens, over a constant length",
        "arXiv 2503.20783",
        {
            "max_length": Parameter("the constant, in tokens", low=1, example=4),
            "num_sequences": NUM_SEQUENCES,
        },
        Dialect(
            upstream="verl",
            denominators={"max_length": "width"},
            source=AGG,
            proof=VERL_EQUAL,
            note="loss_scale_factor is max_length; without it the padded width, which varies by batch",
        ),
        Dialect(
            upstream="verl<0.7.1",
            params={"num_sequences": 1},
            denominators={"max_length": "width"},
            source="verl 0.7.0 trainer/ppo/core_algos.py agg_loss (verl-project/verl@b178a3c)",
            proof=IN + "test_verl_before_0_7_1_does_not_divide_its_norm_by_sequences",
            note="not divided by the number of sequences, and so larger by it; also in Stable-RL and SDPO",
        ),
        Dialect(
            upstream="trl",
            params={"max_length": 512},
            denominators={"num_sequences": "rows"},
            source=TRL_LOSS,
            proof=TRL_EQUAL,
            note="loss_type dr_grpo; max_completion_length, 512 by default, is max_length",
        ),
        Dialect(
            upstream="oat",
            params={"max_length": 512},
            denominators={"num_sequences": "rows"},
            source="sail-sg/oat@c1a074c oat/args.py, oat/algorithms/ppo.py PPOLearner; "
            "sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
            proof=OAT_EQUAL,
            note="generate_max_length, 512 by default (53 in 2025-03), is max_length; critic_type drgrpo, "
            "its default",
        ),
    ),
    mode(
        "prompt-mean",
        "the mean over prompts of the mean over the tokens of all rollouts of a prompt",
        "no paper: NovaSky-AI/SkyRL",
        {
            "num_prompts": Parameter("prompts of the whole batch; by default the different group ids", low=0),
        },
        Dialect(
            upstream="skyrl",
            source="NovaSky-AI/SkyRL skyrl/backends/skyrl_train/utils/ppo_utils.py@a956457 "
            "apply_loss_reduction_to_advantages_minibatch",
            proof=IN + "test_prompt_mean_equals_skyrl_as_written",
            note="loss_reduction prompt_mean (its default is token_mean); it scales the advantages of a "
            "mini-batch and sums the loss",
        ),
        needs=(*REDUCED, "group_ids"),
        optional=("prompt_tokens",),
    ),
)

LOSSES = (*KL, *CORRECTIONS, *AGGREGATIONS)
