"""Policy losses. Defaults are the kernels' own; a test holds the two together."""

from composer_plugins.bundled.shared import KERNELS, LOG_RATIO_CLAMP, TINY
from composer_plugins.catalogue import REQUIRED, Dialect, Loss, Parameter

ALONE = ("logprobs", "advantages", "mask")
OLD = ("logprobs", "old_logprobs", "advantages", "mask")
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages", "mask")

DUAL_CLIP = Parameter(None, "bound on the loss where A < 0, in units of |A|; verl: 3.0", low=1)
RATIO_CAP = Parameter(None, "the ratio is capped here in the unclipped branch; TRL's delta", low=1)

ORACLE = "kernels/test_policy_oracle.py::test_loss_gradient_and_metrics_equal_loops"
VERL = "verl 0.9.1 trainer/ppo/core_algos.py "
VERL_VANILLA = "golden/test_policy.py::test_clipped_losses_equal_verl_vanilla"
TRL = "TRL 1.16 trainer/grpo_trainer.py _compute_loss"
TRL_LOSSES = "golden/test_policy_trl.py::test_policy_losses_equal_trl"
OAT = "golden/test_policy.py::test_grpo_and_dr_grpo_equal_oat"


def clip(low: float, high: float) -> dict[str, Parameter]:
    """PPO's two clip ranges."""
    return {
        "clip_low": Parameter(low, "the ratio is clipped below at 1 - clip_low", low=0, high=1),
        "clip_high": Parameter(high, "the ratio is clipped above at 1 + clip_high", low=0),
    }


def bounded(low: float, high: float) -> dict[str, Parameter]:
    """PPO's clip ranges and the further bounds that one upstream or another adds."""
    caps = {"ratio_cap": RATIO_CAP, "dual_clip": DUAL_CLIP, "log_ratio_clamp": LOG_RATIO_CLAMP}
    return clip(low, high) | caps


def vanilla(
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0, note: str = "loss_mode vanilla"
) -> Dialect:
    """verl's one clipped loss; dual clip and clamp are always on."""
    return Dialect(
        upstream="verl",
        params={
            "clip_low": clip_low,
            "clip_high": clip_high,
            "dual_clip": dual_clip,
            "log_ratio_clamp": 20.0,
        },
        source=VERL + "compute_policy_loss_vanilla",
        proof=VERL_VANILLA,
        note=note,
    )


def trl(note: str, **params: float) -> Dialect:
    """A `loss_type` of TRL with the defaults of its config."""
    return Dialect(upstream="trl", params=params, source=TRL, proof=TRL_LOSSES, note=note)


LOSSES = (
    Loss(
        name="ppo",
        kind="policy",
        path=f"{KERNELS}.policy:ppo",
        summary="the pessimistic one of a clipped and an unclipped ratio",
        paper="arXiv 1707.06347",
        needs=OLD,
        parameters=bounded(0.2, 0.2),
        mode="token-mean",
        proof=ORACLE,
        dialects=(
            vanilla(note="loss_mode vanilla; clip_ratio_c is dual_clip"),
            Dialect(
                upstream="openrlhf",
                params={"clip_low": 0.2, "clip_high": 0.2, "log_ratio_clamp": 20.0},
                source="OpenRLHF/OpenRLHF openrlhf/models/loss.py@3c3be62 PolicyLoss",
                proof="no reference obtainable: its package pins flash-attn and deepspeed, which need a GPU",
                note="eps_clip_low_high is clip_low, clip_high; dual_clip is off unless set",
            ),
            Dialect(
                upstream="slime",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="THUDM/slime slime/utils/ppo_utils.py@624b824 compute_policy_loss",
                proof="no reference obtainable: it is not on PyPI and runs on Megatron",
                note="eps_clip, eps_clip_high, eps_clip_c are clip_low, clip_high, dual_clip; no clamp",
            ),
            Dialect(
                upstream="tinker",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="tinker-docs.thinkingmachines.ai/tinker/losses/ppo",
                proof="no reference obtainable: the loss runs on Tinker's servers",
                note="the anchor is the sampler; thresholds are ratios, 0.8 is clip_low = 0.2; a sum",
            ),
        ),
    ),
    Loss(
        name="grpo",
        kind="policy",
        path=f"{KERNELS}.policy:grpo",
        summary="PPO's clip with group-relative advantages",
        paper="arXiv 2402.03300",
        needs=OLD,
        parameters=bounded(0.2, 0.2),
        mode="seq-mean-token-mean",
        proof=ORACLE,
        dialects=(
            vanilla(note="loss_mode vanilla; loss_agg_mode is token-mean unless set"),
            trl(
                "loss_type grpo (bnpo: the same with token-mean); epsilon, epsilon_high, delta are clip_low, "
                "clip_high, ratio_cap; rows without a live token count as sequences",
                clip_low=0.2,
                clip_high=0.2,
            ),
            Dialect(
                upstream="oat",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="sail-sg/oat oat/algorithms/ppo.py@c1a074c PPOLearner.learning_step",
                proof=OAT,
                note="cliprange is both; the recording transcribes the two lines of the clip; tis_c, 2.0 by "
                "default, multiplies in the correction tis",
            ),
            Dialect(
                upstream="areal",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d ppo_actor_loss_fn",
                proof="no reference obtainable: 82 dependencies, with a torch older than ours",
                note="eps_clip, eps_clip_higher, c_clip are clip_low, clip_high, dual_clip; no clamp; a "
                "token mean",
            ),
            Dialect(
                upstream="nemo-rl",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a ClippedPGLossFn",
                proof="no reference obtainable: on PyPI is a placeholder, no package",
                note="ratio_clip_min, _max and _c are clip_low, clip_high, dual_clip; no clamp; a token "
                "mean unless token_level_loss is off",
            ),
        ),
    ),
    Loss(
        name="dapo",
        kind="policy",
        path=f"{KERNELS}.policy:dapo",
        summary="GRPO with clip-higher and a token mean",
        paper="arXiv 2503.14476",
        needs=OLD,
        parameters=bounded(0.2, 0.28),
        mode="token-mean",
        proof=ORACLE,
        dialects=(
            vanilla(clip_high=0.28, dual_clip=10.0, note="loss_mode vanilla, as its recipe for DAPO sets it"),
            trl(
                "loss_type dapo, the default; epsilon_high is epsilon unless set, so no clip-higher; the "
                "denominator is num_items_in_batch",
                clip_low=0.2,
                clip_high=0.2,
            ),
        ),
    ),
    Loss(
        name="dr_grpo",
        kind="policy",
        path=f"{KERNELS}.policy:dr_grpo",
        summary="GRPO without std and with a constant length",
        paper="arXiv 2503.20783",
        needs=OLD,
        parameters=bounded(0.2, 0.2),
        mode="seq-mean-token-sum-norm",
        proof=ORACLE,
        dialects=(
            vanilla(note="loss_mode vanilla; the constant is loss_scale_factor, or else the padded width"),
            trl("loss_type dr_grpo; the constant is max_completion_length", clip_low=0.2, clip_high=0.2),
            Dialect(
                upstream="oat",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source="sail-sg/oat oat/algorithms/ppo.py@c1a074c PPOLearner; "
                "sail-sg/understand-r1-zero@dfca49d train_zero_math.py",
                proof=OAT,
                note="critic_type drgrpo; the constant is generate_max_length; oat's tis_c, 2.0 by default, "
                "multiplies in the correction tis",
            ),
        ),
    ),
    Loss(
        name="sapo",
        kind="policy",
        path=f"{KERNELS}.policy:sapo",
        summary="a sigmoid gate on the ratio in place of the clip",
        paper="arXiv 2511.20347",
        needs=OLD,
        parameters={
            "tau_pos": Parameter(1.0, "sharpness of the gate where A > 0", low=TINY),
            "tau_neg": Parameter(1.05, "sharpness of the gate elsewhere", low=TINY),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        mode="seq-mean-token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="verl",
                params={"tau_pos": 1.0, "tau_neg": 1.05, "log_ratio_clamp": 20.0},
                source=VERL + "compute_policy_loss_sapo",
                proof="golden/test_policy.py::test_sapo_equals_verl",
                note="loss_mode sapo; always seq-mean-token-mean, whatever loss_agg_mode says",
            ),
            trl("loss_type sapo; sapo_temperature_pos, sapo_temperature_neg", tau_pos=1.0, tau_neg=1.05),
            Dialect(
                upstream="areal",
                params={"tau_pos": 1.0, "tau_neg": 1.05},
                source="inclusionAI/AReaL areal/utils/functional/functional.py@4aef98d sapo_loss_fn",
                proof="no reference obtainable: 82 dependencies, with a torch older than ours",
                note="sapo_tau_pos, sapo_tau_neg; a token mean",
            ),
        ),
    ),
    Loss(
        name="kimi",
        kind="policy",
        path=f"{KERNELS}.policy:kimi",
        summary="a clip that ignores the advantage's sign, and a squared log-ratio",
        paper="arXiv 2602.02276",
        needs=OLD,
        parameters={
            "ratio_low": Parameter(REQUIRED, "the ratio is clipped below here", low=0, high=1, example=0.5),
            "ratio_high": Parameter(REQUIRED, "the ratio is clipped above here", low=1, example=2.0),
            "tau": Parameter(REQUIRED, "coefficient of the squared log-ratio", low=0, example=1e-3),
        },
        mode="token-mean",
        proof=ORACLE,
    ),
    Loss(
        name="gspo",
        kind="policy",
        path=f"{KERNELS}.policy:gspo",
        summary="one length-normalised ratio per sequence",
        paper="arXiv 2507.18071",
        needs=OLD,
        parameters=clip(3e-4, 4e-4) | {"ratio_cap": RATIO_CAP},
        mode="seq-mean-token-mean",
        proof=ORACLE,
        dialects=(
            trl(
                "loss_type grpo with importance_sampling_level sequence; epsilon stays 0.2 unless set",
                clip_low=0.2,
                clip_high=0.2,
            ),
        ),
    ),
    Loss(
        name="gspo_token",
        kind="policy",
        path=f"{KERNELS}.policy:gspo_token",
        summary="GSPO's ratio with each token's own gradient",
        paper="arXiv 2507.18071",
        needs=OLD,
        parameters=clip(3e-4, 4e-4)
        | {"log_ratio_cap": Parameter(None, "upper clamp on the log ratio, in nats; verl: 10.0", low=0)},
        mode="seq-mean-token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="verl",
                params={"clip_low": 0.2, "clip_high": 0.2, "log_ratio_cap": 10.0},
                source=VERL + "compute_policy_loss_gspo",
                proof="golden/test_policy.py::test_gspo_token_equals_verl_gspo",
                note="loss_mode gspo; the clips stay PPO's unless set, loss_agg_mode the actor's",
            ),
        ),
    ),
    Loss(
        name="luspo",
        kind="policy",
        path=f"{KERNELS}.policy:luspo",
        summary="GSPO with each sequence's loss times its length",
        paper="arXiv 2602.05261",
        needs=OLD,
        parameters=clip(2e-3, 2.5e-3) | {"ratio_cap": RATIO_CAP},
        mode="seq-mean-token-sum",
        proof=ORACLE,
        dialects=(
            trl(
                "loss_type luspo with importance_sampling_level sequence, which is not the default",
                clip_low=0.2,
                clip_high=0.2,
            ),
        ),
    ),
    Loss(
        name="gmpo",
        kind="policy",
        path=f"{KERNELS}.policy:gmpo",
        summary="the geometric mean of ratios clipped one by one in log space",
        paper="arXiv 2507.20673",
        needs=OLD,
        parameters={
            "clip_low": Parameter(0.4, "the log ratio is clipped below at -clip_low, in nats", low=0),
            "clip_high": Parameter(0.4, "the log ratio is clipped above at clip_high, in nats", low=0),
        },
        mode="seq-mean-token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="gmpo",
                params={"clip_low": 0.4, "clip_high": 0.4},
                source="callsys/GMPO train_zero_math_gmpo.py@205b2bf",
                proof="golden/test_policy.py::test_gmpo_equals_its_authors",
                note="cliprange is both, 0.4 in its scripts; one sequence per micro-batch",
            ),
            Dialect(
                upstream="verl",
                params={"clip_low": 0.2, "clip_high": 0.2},
                source=VERL + "compute_policy_loss_geo_mean",
                proof="golden/test_policy.py::test_gmpo_equals_verl_geo_mean",
                note="loss_mode geo_mean; clip_ratio is taken as nats and stays PPO's 0.2 unless set",
            ),
            Dialect(
                upstream="trl",
                params={"clip_low": 0.4, "clip_high": 0.4},
                source="TRL 1.16 experimental/gmpo/gmpo_trainer.py _compute_loss",
                proof="golden/test_policy_trl.py::test_gmpo_equals_trl",
                note="epsilon, epsilon_high; rows without a live token count as sequences",
            ),
        ),
    ),
    Loss(
        name="cispo",
        kind="policy",
        path=f"{KERNELS}.policy:cispo",
        summary="REINFORCE weighted by a clipped, detached ratio",
        paper="arXiv 2506.13585",
        needs=OLD,
        parameters={
            "clip_low": Parameter(None, "the weight is at least 1 - clip_low; None: no bound", low=0),
            "clip_high": Parameter(0.2, "the weight is at most 1 + clip_high", low=-1),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        mode="token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="verl",
                params={"clip_low": 0.2, "clip_high": 0.2, "log_ratio_clamp": 20.0},
                source=VERL + "compute_policy_loss_cispo",
                proof="golden/test_policy.py::test_cispo_equals_verl",
                note="loss_mode cispo; clip_ratio_low, clip_ratio_high",
            ),
            trl(
                "loss_type cispo; epsilon_high is the cap itself: e is clip_high = e - 1, and the default of "
                "0.2 makes every weight at most 0.2 (ScaleRL: 5.0)",
                clip_high=0.2 - 1,
            ),
        ),
    ),
    Loss(
        name="vespo",
        kind="policy",
        path=f"{KERNELS}.policy:vespo",
        summary="REINFORCE with a gamma-shaped weight of the sequence's whole ratio",
        paper="arXiv 2602.10693",
        needs=OLD,
        optional=("log_weights",),
        parameters={
            "k_pos": Parameter(2.0, "power of the ratio where A >= 0", low=0),
            "lambda_pos": Parameter(3.0, "decay in the ratio where A >= 0", low=1e-4),
            "k_neg": Parameter(3.0, "power of the ratio where A < 0", low=0),
            "lambda_neg": Parameter(2.0, "decay in the ratio where A < 0", low=1e-4),
        },
        mode="token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="vespo",
                params={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
                source="FloyedShen/VESPO recipe/vespo/code/core_algos.py@aa1f304 compute_policy_loss_vespo",
                proof="golden/test_policy.py::test_vespo_equals_its_authors",
                note="its docstring gives other numbers than its code: 1.5, 4.0, 2.5",
            ),
            trl(
                "loss_type vespo; vespo_k_pos and so on; the vLLM correction enters the weight, and not the "
                "loss as with every other loss_type",
                k_pos=2.0,
                lambda_pos=3.0,
                k_neg=3.0,
                lambda_neg=2.0,
            ),
        ),
    ),
    Loss(
        name="dro",
        kind="policy",
        path=f"{KERNELS}.policy:dro",
        summary="REINFORCE held near the old policy by a squared log-ratio",
        paper="arXiv 2405.19107",
        needs=OLD,
        parameters={
            "beta": Parameter(
                REQUIRED, "weight of the squared log-ratio; verl: dro_beta", low=0, example=0.05
            )
        },
        mode="token-mean",
        proof="golden/test_policy.py::test_dro_equals_verl",
    ),
    Loss(
        name="reinforce",
        kind="policy",
        path=f"{KERNELS}.policy:reinforce",
        summary="the score function weighted by the advantage, without any ratio",
        paper="Williams 1992, doi 10.1007/BF00992696",
        needs=ALONE,
        mode="token-mean",
        proof=ORACLE,
    ),
    Loss(
        name="rloo",
        kind="policy",
        path=f"{KERNELS}.policy:rloo",
        summary="REINFORCE on whole completions, with leave-one-out advantages",
        paper="arXiv 2402.14740",
        needs=ALONE,
        mode="seq-mean-token-sum",
        proof=ORACLE,
    ),
    Loss(
        name="gpg",
        kind="policy",
        path=f"{KERNELS}.policy:gpg",
        summary="REINFORCE with advantages corrected for prompts without a signal",
        paper="arXiv 2504.02546",
        needs=ALONE,
        mode="token-mean",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="verl",
                source=VERL + "compute_policy_loss_gpg",
                proof="golden/test_policy.py::test_gpg_equals_verl",
                note="loss_mode gpg",
            ),
        ),
    ),
    Loss(
        name="importance_sampling",
        kind="policy",
        path=f"{KERNELS}.policy:importance_sampling",
        summary="REINFORCE off-policy: the advantage times the ratio to the sampler, unbounded",
        paper="no paper: tinker-docs.thinkingmachines.ai/losses",
        needs=ROLLOUT,
        mode="token-sum",
        proof=ORACLE,
        dialects=(
            Dialect(
                upstream="tinker",
                source="tinker-docs.thinkingmachines.ai/losses",
                proof="no reference obtainable: the loss runs on Tinker's servers",
                note="loss_fn importance_sampling; a sum over tokens",
            ),
        ),
    ),
)
