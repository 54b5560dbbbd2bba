"""Advantages: what a rollout's reward, or a token's return, is compared with."""

from dataclasses import replace
from functools import partial

from composer_plugins.losses.bundled.shared import (
    GRPO_SCORES,
    TRL_CLAIM,
    VERL_CLAIM,
    nemo_rl,
    prime_rl,
    trl,
    verl,
)
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

LOOPS = "kernels/test_advantages.py::test_advantages_equal_loops"
TOKEN_LOOPS = "kernels/test_advantages_tokens.py::"
GOLDEN = "golden/test_advantages.py::"
PRIME_RL = "PRIME-RL@559b447 src/prime_rl/orchestrator/algo/"

advantage = partial(Loss, kind="advantage")
# Fields that many rows share. A row may override them.
within_groups = partial(advantage, needs=GROUPED, optional=("mask", "num_groups"), proof=LOOPS)
r1_zero = partial(
    Dialect,
    upstream="r1-zero",
    source="sail-sg/understand-r1-zero@dfca49d train_zero_math.py compute_monte_carlo_advantages",
    proof=GOLDEN + "test_advantages_equal_understand_r1_zero",
)

OVER_GROUPS, WHITENED = "groups_have_no_influence_on_each_other", "normalised over the batch"


LOSSES = (
    within_groups(
        name="grpo",
        summary="the reward's deviation from its group's mean, in standard deviations",
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
                proof=GOLDEN + "test_grpo_equals_verl",
                note="a group of one passes its reward through, divided by 1 + eps; without "
                "norm_adv_by_std_in_grpo it is dr_grpo",
            ),
            trl(
                params={"ddof": 1, "eps": 1e-4},
                source=GRPO_SCORES,
                proof=GOLDEN + "test_advantages_equal_trl",
                note="scale_rewards is scale; a completion that no reward function scored is masked",
            ),
            r1_zero(
                params={"ddof": 1, "eps": 1e-8},
                note="critic_type grpo; as in oat; a group of one is NaN there, and here 0",
            ),
            Dialect(
                upstream="openrlhf",
                params={"ddof": 1, "eps": 1e-9},
                source="OpenRLHF/OpenRLHF@3c3be62 openrlhf/trainer/ppo_utils/experience_maker.py",
                proof=GOLDEN + "test_grpo_equals_openrlhf",
                note="advantage_estimator group_norm; a group of one is NaN there, and here 0",
            ),
            Dialect(
                upstream="open-instruct",
                params={"ddof": 0, "eps": 1e-8},
                source="allenai/open-instruct@e6c3044 open_instruct/data_loader.py",
                proof=GOLDEN + "test_grpo_equals_open_instruct",
                note="advantage_normalization_type standard (centered, its default, is dr_grpo), by numpy's "
                "population deviation: for one success in four 1.73, elsewhere 1.5",
            ),
            Dialect(
                upstream="slime",
                params={"ddof": 1, "eps": 1e-6},
                source="THUDM/slime@624b824 slime/ray/rollout.py _post_process_rewards",
                proof=GOLDEN + "test_grpo_equals_slime",
                note="in float32; a group of one is NaN there, and here 0; a batch whose size is not groups "
                "times n becomes one group",
            ),
            NEMO_RL(
                params={"ddof": 1, "eps": 1e-6},
                note="normalize_rewards (on by default) without use_leave_one_out_baseline; with it, its "
                "default, it is grpo_leave_one_out",
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
                proof=GOLDEN + "test_grpo_equals_verl",
                note="norm_adv_by_std_in_grpo: false; a group of one passes its reward through",
            ),
            trl(source=GRPO_SCORES, proof=GOLDEN + "test_advantages_equal_trl", note="scale_rewards none"),
            r1_zero(note="critic_type drgrpo; as in oat"),
            prime_rl(
                source=PRIME_RL + "grpo.py GRPOAlgorithm.score_group",
                proof=GOLDEN + "test_advantages_equal_prime_rl",
                note="called grpo there, in float32; length_penalty is off by default",
            ),
            NEMO_RL(note="called grpo there, with normalize_rewards and use_leave_one_out_baseline off"),
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
                proof=GOLDEN + "test_rloo_equals_verl",
                note="rloo_vectorized gives a group of one 0: singleton zero",
            ),
            trl(
                source="trainer/rloo_trainer.py _generate_and_score_completions",
                proof=TRL_CLAIM,
                note="RLOOTrainer; normalize_advantages, off by default, is grpo@trl over the batch "
                "afterwards; with beta (0.05) the KL is taken off the reward before",
            ),
            NEMO_RL(note="called grpo there, with normalize_rewards off"),
        ),
    ),
    within_groups(
        name="grpo_leave_one_out",
        summary="GRPO whose mean and standard deviation are those of the other rewards of the group",
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
        summary="the reward's deviation from its group's mean, over that mean",
        paper="arXiv 2602.02710",
        dialects=(
            prime_rl(
                source=PRIME_RL + "max_rl.py MaxRLAlgorithm.score_group",
                proof=GOLDEN + "test_advantages_equal_prime_rl",
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
                proof=GOLDEN + "test_opo_equals_verl",
            ),
        ),
    ),
    within_groups(
        name="gpg",
        summary="the reward's deviation, scaled up by the batch's share of rewards without a signal",
        paper="arXiv 2504.02546",
        exceptions={OVER_GROUPS: "divided by the share of the rows that have an advantage"},
        parameters={"f_norm": Parameter("divides the advantage", low=1e-6), "singleton": SINGLETON},
        dialects=(
            verl(
                "compute_gpg_outcome_advantage",
                params={"singleton": "raw"},
                proof=GOLDEN + "test_gpg_equals_verl",
                note="alpha is rounded to float32; its argument alpha is ignored",
            ),
        ),
    ),
    within_groups(
        name="pass_at_k",
        summary="only the best of a group: by how much it beats the second best",
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
                proof=GOLDEN + "test_pass_at_k_equals_verl",
                note="grpo_passk; norm_adv_by_std_in_grpo: false is scale none; a group of one raises",
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
                proof=GOLDEN + "test_reinforce_pp_equals_verl",
                note="algorithm.gamma, 1.0 by default",
            ),
        ),
        proof=TOKEN_LOOPS + "test_reinforce_pp_equals_loops",
    ),
    within_groups(
        name="reinforce_pp_baseline",
        summary="the reward's deviation from its group's mean, whitened over the batch",
        paper="arXiv 2501.03262",
        optional=("lengths", "mask", "num_groups"),
        exceptions={OVER_GROUPS: WHITENED},
        parameters={"variance_eps": VARIANCE_EPS, "singleton": SINGLETON},
        dialects=(
            verl(
                "compute_reinforce_plus_plus_baseline_outcome_advantage",
                params={"singleton": "raw"},
                proof=GOLDEN + "test_reinforce_pp_baseline_equals_verl",
                note="whitened over tokens: give lengths",
            ),
        ),
    ),
    advantage(
        name="gdpo",
        summary="several rewards, each normalised in its group, summed and normalised over the batch",
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
                proof=GOLDEN + "test_gdpo_equals_verl",
                note="whitened over tokens: give lengths; gdpo_reward_weights are component_weights",
            ),
            trl(
                params={"eps": 1e-4, "batch_eps": 1e-4},
                source=GRPO_SCORES,
                proof=GOLDEN + "test_gdpo_equals_trl",
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
                proof=VERL_CLAIM,
                note="reward_baselines",
            ),
        ),
        proof=TOKEN_LOOPS + "test_remax_equals_loops",
    ),
    advantage(
        name="gae",
        summary="generalized advantage estimation with a critic",
        paper="arXiv 1506.02438",
        needs=("token_rewards", "values", "mask"),
        exceptions={OVER_GROUPS: WHITENED},
        parameters={
            "gamma": GAMMA,
            "lam": Parameter("decay of later temporal differences", low=0, high=1),
            "whiten": Parameter("normalise over the batch's unmasked tokens", choices=(True, False)),
            "variance_eps": replace(VARIANCE_EPS, only_with=("whiten", True)),
        },
        dialects=(
            verl(
                "compute_gae_advantage_return",
                params={"gamma": 1.0, "lam": 1.0},
                proof=VERL_CLAIM,
                note="algorithm.gamma and lam are 1.0 by default; its returns are whiten: false plus values",
            ),
        ),
        proof=TOKEN_LOOPS + "test_gae_equals_loops",
    ),
)
