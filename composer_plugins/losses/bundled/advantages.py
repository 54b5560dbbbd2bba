"""Advantages: what a rollout's reward, or a token's return, is compared with."""

from dataclasses import replace
from functools import partial

from composer_plugins.losses.bundled.shared import GRPO_SCORES, TINY, nemo_rl, prime_rl, skyrl, trl, verl
from composer_plugins.losses.row import Dialect, Loss, Parameter

NEMO_RL = partial(
    nemo_rl, source="NVIDIA-NeMo/RL nemo_rl/algorithms/advantage_estimator.py@7ea279a GRPOAdvantageEstimator"
)
GROUPED = ("rewards", "group_ids")
SINGLETON = Parameter("what a group of one gets: 0, or its own reward", choices=("zero", "raw"))
DDOF = Parameter("delta degrees of freedom of the standard deviation", low=0, high=1, integer=True)
EPS = Parameter("added to the standard deviation", low=0)
GAMMA = Parameter("discount per unmasked token", low=0, high=1)
VARIANCE_EPS = Parameter("added to the batch's variance", low=0)
WHITENING = {
    "whiten": Parameter("normalise over the batch's unmasked tokens", choices=(True, False)),
    "variance_eps": replace(VARIANCE_EPS, only_with=("whiten", True)),
}

LOOPS = "kernels/test_advantages.py::test_advantages_equal_loops"
TOKEN_LOOPS = "kernels/test_advantages_tokens.py::"
GOLDEN = "golden/test_advantages.py::"
PRIME_RL = "PRIME-RL@559b447 src/prime_rl/orchestrator/algo/"

SUCCESS = "kernels/test_advantages_success.py::"
ALONE = Parameter("what a token gets that no other rollout has: 0, or its return", choices=("zero", "raw"))
OTB_EPS = Parameter("added to the sum of the weights", low=0)
IN_VERL = "verl gives sum_pi_squared to its own estimator only, with actor.calculate_sum_pi_squared"

OVER_GROUPS, WHITENED = "groups_have_no_influence_on_each_other", "normalised over the batch"

advantage = partial(Loss, kind="advantage")
# Fields that many rows share. A row may override them.
within_groups = partial(advantage, needs=GROUPED, optional=("mask", "num_groups"), proof=LOOPS)
token_baseline = partial(
    advantage,
    paper="arXiv 2602.07078",
    needs=("token_rewards", "old_logprobs", "sum_pi_squared", "group_ids", "mask"),
    optional=("correction_weights", "num_groups"),
    proof=TOKEN_LOOPS + "test_optimal_token_baseline_equals_loops",
)
with_critic = partial(
    advantage,
    needs=("token_rewards", "values", "mask"),
    exceptions={OVER_GROUPS: WHITENED},
    proof=TOKEN_LOOPS + "test_gae_and_length_adaptive_gae_equal_loops",
)
r1_zero = partial(
    Dialect,
    upstream="r1-zero",
    source="sail-sg/understand-r1-zero@dfca49d train_zero_math.py compute_monte_carlo_advantages",
    proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
)

torchtitan = partial(
    Dialect,
    upstream="torchtitan",
    source="torchtitan 0.3.0 experiments/rl/rollout/advantage.py AdvantageEstimator",
    proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
)


def openrlhf(note: str) -> Dialect:
    """An advantage_estimator of OpenRLHF that sets none of our parameters."""
    return Dialect(
        upstream="openrlhf",
        source="OpenRLHF 0.11.2 openrlhf/trainer/ppo_utils/experience_maker.py",
        proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
        note=note,
    )


LOSSES = (
    within_groups(
        name="grpo",
        summary="the reward less the group's mean, in standard deviations",
        paper="arXiv 2402.03300",
        exceptions={f"{OVER_GROUPS}(scale='batch')": WHITENED},
        parameters={
            "scale": Parameter("whose standard deviation", choices=("group", "batch", "none")),
            "ddof": replace(DDOF, only_with=("scale", "group", "batch")),
            "eps": replace(EPS, only_with=("scale", "group", "batch")),
            "singleton": SINGLETON,
        },
        dialects=(
            verl(
                "compute_grpo_outcome_advantage",
                params={"ddof": 1, "eps": 1e-6, "singleton": "raw"},
                note="a group of one passes its reward through, divided by 1 + eps; without "
                "norm_adv_by_std_in_grpo it is dr_grpo",
            ),
            trl(
                params={"ddof": 1, "eps": 1e-4},
                source=GRPO_SCORES,
                note="scale_rewards is scale; a completion that no reward function scored is masked",
            ),
            skyrl(
                "compute_grpo_outcome_advantage",
                params={"ddof": 1, "eps": 1e-6, "singleton": "raw"},
                note="advantage_estimator grpo, with the means and deviations in float32; grpo_norm_by_std: "
                "false is scale none; a group of one passes its reward through",
            ),
            r1_zero(
                params={"ddof": 1, "eps": 1e-8},
                note="critic_type grpo; as in oat; a group of one is NaN there, and here 0",
            ),
            Dialect(
                upstream="openrlhf",
                params={"ddof": 1, "eps": 1e-9},
                source="OpenRLHF/OpenRLHF@3c3be62 openrlhf/trainer/ppo_utils/experience_maker.py",
                proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
                note="advantage_estimator group_norm; a group of one is NaN there, and here 0",
            ),
            Dialect(
                upstream="open-instruct",
                params={"ddof": 0, "eps": 1e-8},
                source="allenai/open-instruct@e6c3044 open_instruct/data_loader.py",
                proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
                note="advantage_normalization_type standard (centered, its default, is dr_grpo), by numpy's "
                "population deviation: for one success in four 1.73, elsewhere 1.5",
            ),
            Dialect(
                upstream="slime",
                params={"ddof": 1, "eps": 1e-6},
                source="THUDM/slime@624b824 slime/ray/rollout.py _post_process_rewards",
                proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
                note="in float32; a group of one is NaN there, and here 0; a batch whose size is not groups "
                "times n becomes one group",
            ),
            NEMO_RL(
                params={"ddof": 1, "eps": 1e-6},
                note="normalize_rewards (on by default) without use_leave_one_out_baseline; with it, its "
                "default, it is grpo_leave_one_out",
            ),
            torchtitan(
                params={"ddof": 0, "eps": 1e-6}, note="should_std_normalize; the population deviation"
            ),
        ),
    ),
    within_groups(
        name="dr_grpo",
        summary="the reward's deviation from its group's mean",
        paper="arXiv 2503.20783",
        parameters={"singleton": SINGLETON},
        dialects=(
            verl(
                "compute_grpo_outcome_advantage",
                params={"singleton": "raw"},
                note="norm_adv_by_std_in_grpo: false; a group of one passes its reward through",
            ),
            trl(source=GRPO_SCORES, note="scale_rewards none"),
            r1_zero(note="critic_type drgrpo; as in oat"),
            prime_rl(
                source=PRIME_RL + "grpo.py GRPOAlgorithm.score_group",
                proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
                note="called grpo there, in float32; length_penalty is off by default",
            ),
            NEMO_RL(note="called grpo there, with normalize_rewards and use_leave_one_out_baseline off"),
            torchtitan(note="its default, should_std_normalize=False"),
            openrlhf("advantage_estimator dr_grpo; reinforce_baseline is the same, whitened over the batch"),
        ),
    ),
    within_groups(
        name="rloo",
        summary="the reward less the mean of the others of its group",
        paper="arXiv 2402.14740",
        parameters={"singleton": SINGLETON},
        dialects=(
            verl(
                "compute_rloo_outcome_advantage",
                params={"singleton": "raw"},
                note="rloo_vectorized gives a group of one 0: singleton zero",
            ),
            skyrl("compute_rloo_outcome_advantage", note="advantage_estimator rloo"),
            trl(
                source="trainer/rloo_trainer.py _generate_and_score_completions",
                note="RLOOTrainer; normalize_advantages, off by default, is grpo@trl over the batch "
                "afterwards; with beta (0.05) the KL is taken off the reward before",
            ),
            NEMO_RL(note="called grpo there, with normalize_rewards off"),
            openrlhf("advantage_estimator rloo; the KL is taken off the reward of each token"),
        ),
    ),
    within_groups(
        name="grpo_leave_one_out",
        summary="as grpo, by mean and deviation of the group's other rewards",
        paper="no paper: NVIDIA-NeMo/RL",
        parameters={"eps": EPS},
        dialects=(
            NEMO_RL(
                params={"eps": 1e-6},
                note="adv_estimator grpo with normalize_rewards and use_leave_one_out_baseline, its default",
            ),
        ),
    ),
    within_groups(
        name="maxrl",
        summary="the reward less the group's mean, over that mean",
        paper="arXiv 2602.02710",
        parameters={"eps": replace(EPS, help="added to the mean"), "singleton": SINGLETON},
        dialects=(
            skyrl(
                "compute_maxrl_advantage",
                params={"eps": 1e-6, "singleton": "raw"},
                note="advantage_estimator maxrl, with the means in float32; where a group's mean is not "
                "above 0 it still divides by it",
            ),
            prime_rl(
                source=PRIME_RL + "max_rl.py MaxRLAlgorithm.score_group",
                proof=GOLDEN + "test_advantages_of_groups_equal_upstream",
                note="called max_rl there, in float32",
            ),
        ),
    ),
    within_groups(
        name="opo",
        summary="the reward less its group's mean weighted by length",
        paper="arXiv 2505.23585",
        needs=(*GROUPED, "lengths"),
        parameters={"singleton": SINGLETON},
        dialects=(
            verl(
                "compute_opo_outcome_advantage",
                params={"singleton": "raw"},
            ),
        ),
    ),
    within_groups(
        name="gpg",
        summary="as dr_grpo, scaled up for rewards without a signal",
        paper="arXiv 2504.02546",
        exceptions={OVER_GROUPS: "divided by the share of the rows that have an advantage"},
        parameters={"f_norm": Parameter("divides the advantage", low=1e-6), "singleton": SINGLETON},
        dialects=(
            verl(
                "compute_gpg_outcome_advantage",
                params={"singleton": "raw"},
                note="alpha is rounded to float32; its argument alpha is ignored",
            ),
        ),
    ),
    within_groups(
        name="pass_at_k",
        summary="the best of a group alone: its lead over the second best",
        paper="arXiv 2503.19595",
        parameters={
            "scale": Parameter("what divides the lead", choices=("group", "none")),
            "ddof": replace(DDOF, only_with=("scale", "group")),
            "eps": replace(EPS, only_with=("scale", "group")),
        },
        dialects=(
            verl(
                "compute_grpo_passk_outcome_advantage",
                params={"scale": "group", "eps": 1e-6},
                note="grpo_passk; norm_adv_by_std_in_grpo: false is scale none; a group of one raises",
            ),
        ),
    ),
    within_groups(
        name="pass_at_k_training",
        summary="the advantage of pass@k, over all groups of k rollouts",
        paper="arXiv 2508.10751",
        parameters={
            "k": Parameter(
                "rollouts of which one must succeed; 1 is grpo with ddof 0", low=1, integer=True, example=1
            ),
            "eps": EPS,
        },
        proof=SUCCESS + "test_pass_at_k_training_is_the_mean_over_all_groups_of_k",
        dialects=(
            Dialect(
                upstream="passk-training",
                params={"eps": 1e-6},
                source="RUCAIBox/Passk_Training code/passk_adv.py@c3ba575",
                proof=GOLDEN + "test_pass_at_k_training_equals_its_authors",
                note="K is `k`, without a default; rewards of 1 and 0 only",
            ),
        ),
    ),
    within_groups(
        name="bnpo",
        summary="as dr_grpo, over the density of a fitted Beta distribution",
        paper="arXiv 2506.02864",
        exceptions={OVER_GROUPS: "the distribution is fitted to all prompts of the batch"},
        parameters={"singleton": SINGLETON},
        proof=GOLDEN + "test_bnpo_equals_its_authors",
        dialects=(
            Dialect(
                upstream="bnpo",
                params={"singleton": "raw"},
                source="changyi7231/BNPO recipe/bnpo/src/bnpo_ray_trainer.py@a9c51b9",
                proof=GOLDEN + "test_bnpo_equals_its_authors",
                note="min_value 0 and max_value 1, its defaults",
            ),
        ),
    ),
    advantage(
        name="a2po",
        summary="the reward less the best value near a reference policy",
        paper="arXiv 2505.20686",
        needs=("rewards", "reference_rewards"),
        optional=("mask",),
        parameters={"beta": Parameter("the paper's beta_1: 0 the best reward, large the mean", low=TINY)},
        proof=SUCCESS + "test_a2po_equals_its_formula",
        dialects=(
            trl(
                params={"beta": 0.5},
                source="experimental/a2po/a2po_trainer.py A2POTrainer",
                note="beta1 is `beta`, num_value_samples the completions of the reference; its loss is a "
                "regression on this advantage",
            ),
        ),
    ),
    token_baseline(
        name="optimal_token_baseline",
        summary="the return less the baseline of least variance, per token",
        parameters={
            "by": Parameter("where rollouts are compared", choices=("position", "token")),
            "alone": ALONE,
            "eps": OTB_EPS,
        },
        dialects=(
            verl(
                "compute_optimal_token_baseline_advantage",
                params={"alone": "raw", "eps": 1e-8},
                note=IN_VERL,
            ),
        ),
    ),
    token_baseline(
        name="tir_optimal_token_baseline",
        summary="the optimal token baseline, without the tokens of tools",
        parameters={"alone": ALONE, "eps": OTB_EPS},
        dialects=(
            verl(
                "compute_multi_turn_optimal_token_baseline_advantage",
                params={"alone": "raw", "eps": 1e-8},
                note=IN_VERL,
            ),
        ),
    ),
    advantage(
        name="reinforce_pp",
        summary="the discounted return of each token, whitened over the batch",
        paper="arXiv 2501.03262",
        needs=("token_rewards", "mask"),
        exceptions={OVER_GROUPS: WHITENED},
        parameters={"gamma": GAMMA, "variance_eps": VARIANCE_EPS},
        dialects=(
            verl(
                "compute_reinforce_plus_plus_outcome_advantage",
                note="algorithm.gamma, 1.0 by default",
            ),
            skyrl(
                "compute_reinforce_plus_plus_outcome_advantage",
                note="advantage_estimator reinforce++; its mask is of whole responses, without a hole",
            ),
        ),
        proof=TOKEN_LOOPS + "test_reinforce_pp_equals_loops",
    ),
    within_groups(
        name="reinforce_pp_baseline",
        summary="as dr_grpo, whitened over the batch",
        paper="arXiv 2501.03262",
        optional=("lengths", "mask", "num_groups"),
        exceptions={OVER_GROUPS: WHITENED},
        parameters={"variance_eps": VARIANCE_EPS, "singleton": SINGLETON},
        dialects=(
            verl(
                "compute_reinforce_plus_plus_baseline_outcome_advantage",
                params={"singleton": "raw"},
                note="whitened over tokens: give lengths",
            ),
        ),
    ),
    advantage(
        name="gdpo",
        summary="several rewards, each normalised by group, then their sum",
        paper="arXiv 2601.05242",
        needs=("reward_components", "group_ids"),
        optional=("mask", "lengths", "component_weights", "component_mask", "num_groups"),
        exceptions={OVER_GROUPS: WHITENED},
        parameters={
            "ddof": DDOF,
            "eps": Parameter("added to a group's standard deviation", low=0),
            "batch_eps": Parameter("added to the batch's standard deviation", low=0),
            "variance_eps": VARIANCE_EPS,
            "singleton": SINGLETON,
        },
        dialects=(
            verl(
                "compute_gdpo_outcome_advantage",
                params={"eps": 1e-6, "batch_eps": 0.0, "variance_eps": 1e-8, "singleton": "raw"},
                note="whitened over tokens: give lengths; gdpo_reward_weights are component_weights",
            ),
            trl(
                params={"eps": 1e-4, "batch_eps": 1e-4},
                source=GRPO_SCORES,
                note="multi_objective_aggregation normalize_then_sum; reward_weights are component_weights, "
                "and component_mask is False where a reward function returned None",
            ),
        ),
        proof=TOKEN_LOOPS + "test_gdpo_equals_loops",
    ),
    advantage(
        name="remax",
        summary="the return less the reward of the greedy completion",
        paper="arXiv 2310.10505",
        needs=("token_rewards", "baselines", "mask"),
        dialects=(
            verl(
                "compute_remax_outcome_advantage",
                note="reward_baselines",
            ),
        ),
        proof=TOKEN_LOOPS + "test_remax_equals_loops",
    ),
    with_critic(
        name="gae",
        summary="generalized advantage estimation with a critic",
        paper="arXiv 1506.02438",
        parameters={
            "gamma": GAMMA,
            "lam": Parameter("decay of later temporal differences", low=0, high=1),
        }
        | WHITENING,
        dialects=(
            verl(
                "compute_gae_advantage_return",
                params={"gamma": 1.0, "lam": 1.0},
                note="algorithm.gamma and lam are 1.0 by default; its returns are whiten: false plus values",
            ),
            skyrl(
                "compute_gae_advantage_return",
                params={"gamma": 1.0, "lam": 1.0},
                note="advantage_estimator gae; gamma, lambd; it also reads the rewards and the values of "
                "padding, which are 0",
            ),
        ),
    ),
    with_critic(
        name="length_adaptive_gae",
        summary="GAE whose lambda grows with the response's length (VAPO)",
        paper="arXiv 2504.05118",
        parameters={
            "gamma": GAMMA,
            "alpha": Parameter("lambda is 1 - 1 / (alpha length)", low=TINY),
        }
        | WHITENING,
        dialects=(
            Dialect(
                upstream="nemo-rl",
                params={"whiten": False},
                source="NVIDIA-NeMo/RL nemo_rl/algorithms/advantage_estimator.py@7ea279a "
                "GeneralizedAdvantageEstimator",
                proof=GOLDEN + "test_length_adaptive_gae_equals_nemo_rl",
                note="length_adaptive_alpha is `alpha`; normalize_advantages off",
            ),
        ),
    ),
)
