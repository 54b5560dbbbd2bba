"""Policy losses. The kernels have the defaults."""

import math
from collections.abc import Mapping
from functools import partial

from composer_plugins.losses.bundled.shared import (
    CLIPS,
    GRPO_LOSS,
    LOG_RATIO_CLAMP,
    PERCENTAGE,
    PPO_CLIPS,
    SEQUENCE_CLIPS,
    TINY,
    nemo_rl,
    oat,
    skyrl,
    slime,
    trl,
    verl,
)
from composer_plugins.losses.row import Dialect, Loss, Parameter, Unlikely, Value

OLD = ("logprobs", "old_logprobs", "advantages", "mask")
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages", "mask")

RATIO_CAP = Parameter("the ratio is capped here in the unclipped branch", low=1)
# A weight of at most 1 + clip_high, below 1: the ratio of a token that is on-policy is 1. TRL's documentation
# has a cap of 5.0, from ScaleRL, arXiv 2510.13786. Its default, 0.2, is the default of PPO's clip.
BELOW_ONE = Unlikely(
    -math.inf,
    0,
    "caps every weight at {ratio:g}, so the gradient of each on-policy token is multiplied by {ratio:g}",
    "set a number above 0 (ScaleRL and TRL's documentation: clip_high=4, which is epsilon_high=5.0 in TRL)",
)
BOUNDS = CLIPS | {
    "ratio_cap": RATIO_CAP,
    "weight_cap": Parameter("the ratio is capped here and keeps its gradient; PRIME-RL: 10000", low=1),
    "dual_clip": Parameter("bound on the loss where A < 0, in units of |A|; verl: 3.0", low=1),
    "log_ratio_clamp": LOG_RATIO_CLAMP,
}

VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}

ORACLE = "kernels/test_policy_oracle.py::test_loss_gradient_and_metrics_equal_loops"
GOLDEN = "golden/test_policy.py::"
TRAINERS = "golden/test_policy_trainers.py::"
HOSTS = "golden/test_policy_hosts.py::"

# Fields that many rows share. A row may override them. The ratio is to the old policy.
policy = partial(Loss, kind="policy", proof=ORACLE)
with_ratio = partial(policy, needs=OLD)
without_ratio = partial(policy, needs=("logprobs", "advantages", "mask"))
clipped = partial(
    with_ratio,
    parameters=BOUNDS,
    exceptions={"gradient_is_that_of_the_value(weight_cap=1.5)": "a capped ratio keeps its gradient"},
)
clipped_by_sequence = partial(
    with_ratio, parameters=SEQUENCE_CLIPS | {"ratio_cap": RATIO_CAP}, per_sequence=True
)


def vanilla(
    note: str, *, clip_high: float = 0.2, dual_clip: float = 3.0, mode: str = "token-mean"
) -> Dialect:
    """verl's one clipped loss: dual clip and clamp are always on, loss_agg_mode is token-mean unless set."""
    params = {"clip_low": 0.2, "clip_high": clip_high, "dual_clip": dual_clip, "log_ratio_clamp": 20.0}
    return verl("compute_policy_loss_vanilla", params=params, note=note, mode=mode)


def torchtitan(note: str) -> Dialect:
    """torchtitan's one clipped loss: its log ratio is clamped at 10 nats, and the mean is over tokens."""
    return Dialect(
        upstream="torchtitan",
        params=PPO_CLIPS | {"log_ratio_clamp": 10.0},
        source="torchtitan 0.3.0 experiments/rl/losses/dapo.py DAPOLoss",
        proof=HOSTS + "test_grpo_and_dapo_equal_torchtitan",
        note=note,
        mode="token-mean",
    )


# Sums over tokens: of ROLL, its methods alone, without the reduction of their worker.
RECORDED = "golden/test_policy_off_policy.py::test_losses_equal_their_authors"


def roll(
    note: str,
    params: Mapping[str, Value],
    worker: str = "ActorPGWorker",
    proof: str = HOSTS + "test_losses_equal_roll",
) -> Dialect:
    """A loss of ROLL's workers with its default reduction."""
    return Dialect(
        upstream="roll",
        params=params,
        source=f"alibaba/ROLL roll/pipeline/rlvr/@8eb27cc {worker}.loss_func",
        proof=proof,
        note=note,
        mode="seq-mean-token-mean",
    )


def ms_swift(note: str, mode: str, **params: Value) -> Dialect:
    """A `loss_type` of ms-swift's GRPOTrainer with the defaults of its arguments."""
    return Dialect(
        upstream="ms-swift",
        params=params,
        source="ms-swift 4.6.0 swift/rlhf_trainers/grpo_trainer.py _compute_loss_and_metrics",
        proof=HOSTS + "test_losses_equal_ms_swift",
        note=note,
        mode=mode,
    )


def trinity(file: str, note: str, mode: str, **params: Value) -> Dialect:
    """A policy loss of Trinity-RFT with the numbers of its `default_args`."""
    return Dialect(
        upstream="trinity-rft",
        params=params,
        source=f"Trinity-RFT 0.6.0 trinity/algorithm/policy_loss_fn/{file}_policy_loss.py",
        proof=HOSTS + "test_losses_equal_trinity_rft",
        note=note,
        mode=mode,
    )


def fireworks(file: str, note: str, **params: Value) -> Dialect:
    """A loss of Fireworks' cookbook, a function of Tinker's signature that returns a sum."""
    return Dialect(
        upstream="fireworks",
        params=params,
        source=f"fw-ai/cookbook training/utils/rl/{file}.py@76821fa",
        proof=HOSTS + "test_losses_equal_fireworks",
        note=note,
        mode="token-sum",
    )


def grpo_trainer(note: str, **params: float) -> Dialect:
    """A `loss_type` of TRL's GRPOTrainer with the defaults of its config."""
    return trl(params=params, source=GRPO_LOSS, note=note)


LOSSES = (
    clipped(
        name="ppo",
        summary="the larger of the clipped and the unclipped loss",
        paper="arXiv 1707.06347",
        mode="token-mean",
        dialects=(
            vanilla("loss_mode vanilla; clip_ratio_c is dual_clip"),
            Dialect(
                upstream="openrlhf",
                params=PPO_CLIPS | {"log_ratio_clamp": 20.0},
                source="OpenRLHF/OpenRLHF openrlhf/models/loss.py@3c3be62 PolicyLoss",
                proof=TRAINERS + "test_ppo_equals_openrlhf",
                note="eps_clip_low_high is clip_low, clip_high; dual_clip is off unless set; a batch without "
                "an unmasked token is NaN there",
            ),
            Dialect(
                upstream="slime",
                params=PPO_CLIPS,
                source="THUDM/slime slime/utils/ppo_utils.py@624b824 compute_policy_loss",
                proof=TRAINERS + "test_ppo_equals_slime",
                note="eps_clip, eps_clip_high, eps_clip_c are clip_low, clip_high, dual_clip; no clamp; rows "
                "without an unmasked token count as sequences; calculate_per_token_loss is token-mean",
                mode="seq-mean-token-mean",
            ),
            Dialect(
                upstream="tinker",
                params=PPO_CLIPS,
                source="tinker-docs.thinkingmachines.ai/tinker/losses/ppo",
                proof="no reference obtainable: the loss runs on Tinker's servers",
                note="old_logprobs are the sampler's; thresholds are ratios, 0.8 is clip_low = 0.2; a sum",
                mode="token-sum",
            ),
            trinity(
                "ppo",
                "clip_range, clip_range_low, clip_range_high; clip_ratio_c is dual_clip, and always on; "
                "every denominator is n + 1e-8",
                "token-mean",
                **PPO_CLIPS,
                dual_clip=3.0,
                log_ratio_clamp=20.0,
            ),
        ),
    ),
    clipped(
        name="grpo",
        summary="PPO's clip with group-relative advantages",
        paper="arXiv 2402.03300",
        mode="seq-mean-token-mean",
        dialects=(
            vanilla("loss_mode vanilla; loss_agg_mode is token-mean unless set"),
            grpo_trainer(
                "loss_type grpo (bnpo: the same with token-mean); epsilon, epsilon_high, delta are clip_low, "
                "clip_high, ratio_cap; rows without an unmasked token count as sequences",
                **PPO_CLIPS,
            ),
            oat(
                params=PPO_CLIPS,
                source="sail-sg/oat oat/algorithms/ppo.py@c1a074c PPOLearner.learning_step",
                note="cliprange is both; the recording transcribes the two lines of the clip; tis_c, 2.0 by "
                "default, multiplies in the correction tis",
            ),
            Dialect(
                upstream="areal",
                params=PPO_CLIPS,
                source="inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d ppo_actor_loss_fn",
                proof=TRAINERS + "test_grpo_and_sapo_equal_areal",
                note="eps_clip, eps_clip_higher, c_clip are clip_low, clip_high, dual_clip; no clamp; a "
                "token mean",
                mode="token-mean",
            ),
            Dialect(
                upstream="nemo-rl",
                params=PPO_CLIPS,
                source="NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a ClippedPGLossFn",
                proof=TRAINERS + "test_grpo_equals_nemo_rl",
                note="ratio_clip_min, _max and _c are clip_low, clip_high, dual_clip; no clamp; a token "
                "mean unless token_level_loss is off; every denominator is n + 1e-8; a KL to the reference "
                "is added (reference_policy_kl_penalty, 0.01 by default)",
                mode="token-mean",
            ),
            skyrl(
                "ppo_policy_loss",
                params=PPO_CLIPS | {"log_ratio_clamp": 20.0},
                note="policy_loss_type regular, or dual_clip, whose clip_ratio_c (3.0) is dual_clip; "
                "eps_clip_low, eps_clip_high; a ratio is computed in float32; loss_reduction is token_mean "
                "unless set",
                mode="token-mean",
            ),
            slime(
                "compute_policy_loss",
                "every advantage_estimator without a loss of its own; eps_clip, eps_clip_high, eps_clip_c",
            ),
            torchtitan(
                "GRPOLoss; clip_eps is both clips; the old policy is the generator's, and a token whose "
                "generator log-probability is not finite is left out"
            ),
            roll(
                "ActorWorker, or ActorPGWorker with pg_variant ppo; pg_clip is both clips, and with "
                "use_pg_clip_range pg_clip_low, pg_clip_high; dual_clip_loss is dual_clip = 1 + 2 pg_clip; "
                "its token-mean does not mask, and relies on advantages of 0",
                PPO_CLIPS,
                "ActorWorker",
            ),
            ms_swift(
                "loss_type grpo (bnpo: the same with token-mean); epsilon, epsilon_high, delta are clip_low, "
                "clip_high, ratio_cap; rows without an unmasked token count as sequences",
                "seq-mean-token-mean",
                **PPO_CLIPS,
            ),
        ),
    ),
    clipped(
        name="dapo",
        summary="GRPO with clip-higher and a token mean",
        paper="arXiv 2503.14476",
        mode="token-mean",
        dialects=(
            vanilla("loss_mode vanilla, as its recipe for DAPO sets it", clip_high=0.28, dual_clip=10.0),
            grpo_trainer(
                "loss_type dapo, the default; epsilon_high is epsilon unless set, so no clip-higher; the "
                "denominator is num_items_in_batch",
                **PPO_CLIPS,
            ),
            torchtitan(
                "DAPOLoss; ratio_clip_low, ratio_clip_high, which is 0.2 unless set (its recipe: 0.28); "
                "otherwise as grpo@torchtitan"
            ),
            ms_swift(
                "loss_type dapo; epsilon_high is epsilon unless set, so no clip-higher; the denominator is "
                "num_items_in_batch of the whole gradient accumulation",
                "token-mean",
                **PPO_CLIPS,
            ),
            fireworks(
                "dapo",
                "eps_clip, eps_clip_high, eps_clip_c are clip_low, clip_high, dual_clip; ratio_log_cap is "
                "the clamp; tis@fireworks multiplies it",
                clip_low=0.2,
                clip_high=0.28,
                log_ratio_clamp=20.0,
            ),
        ),
    ),
    clipped(
        name="dr_grpo",
        summary="GRPO without std and with a constant length",
        paper="arXiv 2503.20783",
        mode="seq-mean-token-sum-norm",
        advantage="dr_grpo",
        dialects=(
            vanilla(
                "loss_mode vanilla, with loss_agg_mode seq-mean-token-sum-norm as its documentation sets it; "
                "the constant is loss_scale_factor, or else the padded width",
                mode="seq-mean-token-sum-norm",
            ),
            grpo_trainer("loss_type dr_grpo; the constant is max_completion_length", **PPO_CLIPS),
            ms_swift(
                "loss_type dr_grpo; the constant is max_completion_length, and every row is a sequence",
                "seq-mean-token-sum-norm",
                **PPO_CLIPS,
            ),
            oat(
                params=PPO_CLIPS,
                source="sail-sg/oat oat/algorithms/ppo.py@c1a074c PPOLearner; "
                "sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
                note="critic_type drgrpo; the constant is generate_max_length; oat's tis_c, 2.0 by default, "
                "multiplies in the correction tis",
            ),
        ),
    ),
    with_ratio(
        name="sapo",
        summary="a sigmoid gate on the ratio in place of the clip",
        paper="arXiv 2511.20347",
        parameters={
            "tau_pos": Parameter("sharpness of the gate where A > 0", low=TINY),
            "tau_neg": Parameter("sharpness of the gate elsewhere", low=TINY),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        mode="seq-mean-token-mean",
        dialects=(
            verl(
                "compute_policy_loss_sapo",
                params={"tau_pos": 1.0, "tau_neg": 1.05, "log_ratio_clamp": 20.0},
                note="loss_mode sapo; always seq-mean-token-mean, whatever loss_agg_mode says",
            ),
            grpo_trainer(
                "loss_type sapo; sapo_temperature_pos, sapo_temperature_neg", tau_pos=1.0, tau_neg=1.05
            ),
            Dialect(
                upstream="areal",
                params={"tau_pos": 1.0, "tau_neg": 1.05},
                source="inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d sapo_loss_fn",
                proof=TRAINERS + "test_grpo_and_sapo_equal_areal",
                note="sapo_tau_pos, sapo_tau_neg; a token mean",
                mode="token-mean",
            ),
            skyrl(
                "sapo_policy_loss",
                params={"tau_pos": 1.0, "tau_neg": 1.05, "log_ratio_clamp": 20.0},
                note="policy_loss_type sapo; loss_reduction is token_mean unless set, and SkyRL then advises "
                "sequence_mean",
                mode="token-mean",
            ),
            ms_swift(
                "loss_type sapo; tau_pos, tau_neg; rows without an unmasked token count as sequences",
                "seq-mean-token-mean",
                tau_pos=1.0,
                tau_neg=1.05,
            ),
        ),
    ),
    with_ratio(
        name="kimi",
        summary="a clip whatever the sign of A, and a squared log-ratio",
        paper="arXiv 2602.02276",
        parameters={
            "ratio_low": Parameter("the ratio is clipped below here", low=0, high=1, example=0.5),
            "ratio_high": Parameter("the ratio is clipped above here", low=1, example=2.0),
            "tau": Parameter(
                "coefficient of the squared log-ratio", low=0, example=1e-3, weighs_a_penalty=True
            ),
        },
        mode="token-mean",
    ),
    clipped_by_sequence(
        name="gspo",
        summary="one length-normalised ratio per sequence",
        paper="arXiv 2507.18071",
        mode="seq-mean-token-mean",
        dialects=(
            nemo_rl(
                params=PPO_CLIPS,
                mode="seq-mean-token-mean",
                note="sequence_level_importance_ratios, which needs token_level_loss off; ratio_clip_min "
                "and _max "
                "stay 0.2 unless set, ratio_clip_c is a dual clip, which this row lacks",
            ),
            slime(
                "compute_gspo_kl",
                "advantage_estimator gspo; eps_clip and eps_clip_high stay 0.2 unless set",
                **PPO_CLIPS,
            ),
            grpo_trainer(
                "loss_type grpo with importance_sampling_level sequence; epsilon stays 0.2 unless set",
                **PPO_CLIPS,
            ),
            roll(
                "ActorWorker with importance_sampling seq; pg_clip stays 0.2 unless set",
                PPO_CLIPS,
                "ActorWorker",
            ),
            ms_swift(
                "loss_type grpo with importance_sampling_level sequence; epsilon stays 0.2 unless set",
                "seq-mean-token-mean",
                **PPO_CLIPS,
            ),
            Dialect(
                upstream="openrlhf",
                params=PPO_CLIPS,
                source="OpenRLHF 0.11.2 openrlhf/models/loss.py PolicyLoss",
                proof=HOSTS + "test_gspo_equals_openrlhf",
                note="policy_loss_type gspo, always a mean over sequences; with is_correction_level the old "
                "policy is the rollout's, and nothing else is corrected",
            ),
            Dialect(
                upstream="areal",
                params=PPO_CLIPS,
                source="inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d ppo_actor_loss_fn",
                proof=HOSTS + "test_gspo_equals_areal",
                note="importance_sampling_level sequence; eps_clip stays 0.2 unless set; a token mean",
                mode="token-mean",
            ),
        ),
    ),
    with_ratio(
        name="gspo_token",
        over_sequence=True,
        gradient="surrogate",
        summary="GSPO's ratio with each token's own gradient",
        paper="arXiv 2507.18071",
        parameters=SEQUENCE_CLIPS
        | {"log_ratio_cap": Parameter("upper clamp on the log ratio, in nats; verl: 10.0", low=0)},
        mode="seq-mean-token-mean",
        dialects=(
            verl(
                "compute_policy_loss_gspo",
                params=PPO_CLIPS | {"log_ratio_cap": 10.0},
                note="loss_mode gspo; the clips stay PPO's unless set, loss_agg_mode the actor's",
                mode="token-mean",
            ),
            skyrl(
                "gspo_policy_loss",
                params=PPO_CLIPS | {"log_ratio_cap": 10.0},
                note="policy_loss_type gspo; the clips stay PPO's unless set; loss_reduction is token_mean "
                "unless set, and SkyRL then advises sequence_mean",
                mode="token-mean",
            ),
            ms_swift(
                "loss_type grpo with importance_sampling_level sequence_token; epsilon stays 0.2 unless set",
                "seq-mean-token-mean",
                **PPO_CLIPS,
            ),
            trinity(
                "gspo",
                "clip_range_low, clip_range_high; a row without an unmasked token counts as a sequence",
                "seq-mean-token-mean",
                clip_low=3e-4,
                clip_high=4e-4,
            ),
            fireworks(
                "gspo",
                "clip_ratio_low, clip_ratio_high; seq_ratio_log_cap is log_ratio_cap; its mean is over the "
                "response with its masked tokens; tis@fireworks multiplies it",
                **PPO_CLIPS,
                log_ratio_cap=10.0,
            ),
        ),
    ),
    clipped_by_sequence(
        name="luspo",
        summary="GSPO with each sequence's loss times its length",
        paper="arXiv 2602.05261",
        mode="seq-mean-token-sum",
        dialects=(
            grpo_trainer(
                "loss_type luspo with importance_sampling_level sequence, which is not the default",
                **PPO_CLIPS,
            ),
        ),
    ),
    with_ratio(
        name="gmpo",
        summary="the geometric mean of ratios clipped in log space",
        paper="arXiv 2507.20673",
        parameters={
            "clip_low": Parameter("the log ratio is clipped below at -clip_low, in nats", low=0),
            "clip_high": Parameter("the log ratio is clipped above at clip_high, in nats", low=0),
        },
        per_sequence=True,
        mode="seq-mean-token-mean",
        dialects=(
            Dialect(
                upstream="gmpo",
                params={"clip_low": 0.4, "clip_high": 0.4},
                source="callsys/GMPO train_zero_math_gmpo.py@205b2bf",
                proof=GOLDEN + "test_gmpo_equals_its_authors",
                note="cliprange is both, 0.4 in its scripts; one sequence per micro-batch",
            ),
            verl(
                "compute_policy_loss_geo_mean",
                params=PPO_CLIPS,
                note="loss_mode geo_mean; always a mean over rows, whatever loss_agg_mode says; clip_ratio "
                "is taken as nats and stays PPO's 0.2 unless set",
            ),
            trl(
                params={"clip_low": 0.4, "clip_high": 0.4},
                source="experimental/gmpo/gmpo_trainer.py GMPOTrainer._compute_loss",
                note="epsilon, epsilon_high; a row without an unmasked token counts as a sequence of ratio 1",
            ),
        ),
    ),
    with_ratio(
        name="cispo",
        gradient="score",
        summary="REINFORCE weighted by a clipped, detached ratio",
        paper="arXiv 2506.13585",
        parameters={
            "clip_low": Parameter("the weight is at least 1 - clip_low; None: no bound", low=0, no_bound=1.0),
            "clip_high": Parameter(
                "the weight is at most 1 + clip_high",
                low=-1,
                unlikely=(BELOW_ONE, PERCENTAGE),
            ),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        mode="token-mean",
        dialects=(
            verl(
                "compute_policy_loss_cispo",
                params=PPO_CLIPS | {"log_ratio_clamp": 20.0},
                note="loss_mode cispo; clip_ratio_low, clip_ratio_high",
            ),
            nemo_rl(
                params=PPO_CLIPS,
                mode="token-mean",
                note="use_cispo, which needs token_level_loss; ratio_clip_min, ratio_clip_max are the two "
                "bounds",
            ),
            slime(
                "compute_cispo_loss",
                "advantage_estimator cispo; eps_clip, eps_clip_high; its warning names eps_clip 1 and "
                "eps_clip_high 4",
                **PPO_CLIPS,
            ),
            grpo_trainer(
                "loss_type cispo; epsilon_high is the cap itself: e is clip_high = e - 1, and the default of "
                "0.2 makes every weight at most 0.2 (ScaleRL: 5.0)",
                clip_high=0.2 - 1,
            ),
            roll(
                "pg_variant cispo; cispo_epsilon_low, cispo_epsilon_high; cispo_use_unified_mask has no row",
                {"clip_low": 0.1, "clip_high": 0.1},
            ),
            ms_swift(
                "loss_type cispo; epsilon_high is the cap itself, as in TRL, and the default of 0.2 makes "
                "every weight at most 0.2; the denominator is num_items_in_batch",
                "token-mean",
                clip_high=0.2 - 1,
            ),
            skyrl(
                "compute_policy_loss_cispo",
                source="skyrl 0.4.0 skyrl/backends/skyrl_train/utils/ppo_utils.py compute_policy_loss_cispo",
                params={"clip_low": 1.0, "clip_high": 4.0, "log_ratio_clamp": 20.0},
                note="policy_loss_type cispo; cispo_eps_clip_low, cispo_eps_clip_high; with cispo_anchor "
                "rollout the ratio is to the rollout policy",
            ),
            skyrl(
                "compute_policy_loss_cispo",
                upstream="skyrl<0.4",
                source="skyrl 0.3.0 skyrl/backends/skyrl_train/utils/ppo_utils.py compute_policy_loss_cispo",
                params={"clip_low": 0.0, "clip_high": 5.0, "log_ratio_clamp": 20.0},
                note="as in 0.4 with other defaults, so that no weight is below 1; without cispo_anchor",
            ),
            trinity(
                "cispo",
                "clip_range_low, clip_range_high; enable_mask_clip has no row; every denominator is n + 1e-8",
                "token-mean",
                clip_low=1.0,
                clip_high=0.28,
            ),
            fireworks(
                "cispo",
                "eps_low, eps_high; ratio_log_cap is the clamp; tis@fireworks multiplies it",
                clip_low=0.2,
                clip_high=0.28,
                log_ratio_clamp=20.0,
            ),
        ),
    ),
    with_ratio(
        name="vespo",
        over_sequence=True,
        gradient="score",
        summary="REINFORCE with a gamma-shaped weight of the sequence's ratio",
        paper="arXiv 2602.10693",
        optional=("log_weights",),
        parameters={
            "k_pos": Parameter("power of the ratio where A >= 0", low=0),
            "lambda_pos": Parameter("decay in the ratio where A >= 0", low=1e-4),
            "k_neg": Parameter("power of the ratio where A < 0", low=0),
            "lambda_neg": Parameter("decay in the ratio where A < 0", low=1e-4),
        },
        mode="token-mean",
        dialects=(
            Dialect(
                upstream="vespo",
                params=VESPO,
                source="FloyedShen/VESPO recipe/vespo/code/core_algos.py@aa1f304 compute_policy_loss_vespo",
                proof=GOLDEN + "test_vespo_equals_its_authors",
                note="its docstring gives other numbers than its code: 1.5, 4.0, 2.5",
            ),
            grpo_trainer(
                "loss_type vespo; vespo_k_pos and so on; the vLLM correction enters the weight, and not the "
                "loss as with every other loss_type",
                **VESPO,
            ),
        ),
    ),
    with_ratio(
        name="dro",
        summary="REINFORCE held near the old policy by a squared log-ratio",
        paper="arXiv 2405.19107",
        parameters={
            "beta": Parameter("weight of the squared log-ratio", low=0, example=0.05, weighs_a_penalty=True)
        },
        mode="token-mean",
        dialects=(
            roll(
                "pg_variant kimi15, which squares the log ratio of each token and not of the "
                "response (kimi_k15); kimi15_tau is beta",
                {"beta": 0.1},
                proof=RECORDED,
            ),
        ),
    ),
    without_ratio(
        name="reinforce",
        summary="the advantage times log pi(y_t), without any ratio",
        paper="Williams 1992, doi 10.1007/BF00992696",
        mode="token-mean",
        dialects=(
            nemo_rl(mode="token-mean", note="disable_ppo_ratio; the clips are not read"),
            roll("pg_variant vanilla", {}),
        ),
    ),
    without_ratio(
        name="rloo",
        summary="REINFORCE on whole completions, leave-one-out advantages",
        paper="arXiv 2402.14740",
        mode="seq-mean-token-sum",
        advantage="rloo",
    ),
    without_ratio(
        name="gpg",
        summary="REINFORCE, advantages corrected for prompts without a signal",
        paper="arXiv 2504.02546",
        mode="token-mean",
        advantage="gpg",
        dialects=(verl("compute_policy_loss_gpg", note="loss_mode gpg"),),
    ),
    policy(
        name="importance_sampling",
        summary="REINFORCE times the ratio to the sampler, without a bound",
        paper="no paper: tinker-docs.thinkingmachines.ai/losses",
        needs=ROLLOUT,
        mode="token-sum",
        dialects=(
            Dialect(
                upstream="tinker",
                source="tinker-docs.thinkingmachines.ai/losses",
                proof="no reference obtainable: the loss runs on Tinker's servers",
                note="loss_fn importance_sampling; a sum over tokens",
            ),
            skyrl(
                "importance_sampling_loss",
                note="policy_loss_type importance_sampling; the ratio is to old_log_probs, which only on its "
                "Tinker server are the sampler's; loss_reduction is token_mean unless set",
                mode="token-mean",
            ),
        ),
    ),
)
