"""Policy losses for old data: penalties, tapers, other weights, gates, clip ranges of a batch."""

from dataclasses import replace
from functools import partial

from composer_plugins.losses.bundled.policy import OLD, RECORDED, ROLLOUT, policy, roll
from composer_plugins.losses.bundled.shared import CLIPS, LOG_RATIO_CLAMP, PPO_CLIPS
from composer_plugins.losses.row import Dialect, Parameter

TRINITY = "Trinity-RFT 0.6.0 trinity/algorithm/policy_loss_fn"

# Fields that many rows share. A row may override them.
with_ratio = partial(policy, needs=OLD, mode="token-mean")
recorded = partial(Dialect, proof=RECORDED)
trinity = partial(recorded, upstream="trinity-rft")

TAU = Parameter(
    "coefficient of the squared log ratio of the response", low=0, example=0.1, weighs_a_penalty=True
)
DUAL_CLIP = Parameter("bound on the loss where A < 0, in units of |A|; the authors' code: 10.0", low=1)
# The least of a step: the number of ranges that are tried is the distance over the step.
STEP = Parameter("by how much a bound is moved at a time", low=0.01)

LOSSES = (
    with_ratio(
        name="spo",
        summary="PPO with a quadratic penalty in place of the clip",
        paper="arXiv 2401.16025",
        parameters={"epsilon": Parameter("the shift of the ratio at which the loss is least", low=0.01)},
        dialects=(
            recorded(
                upstream="spo",
                params={"epsilon": 0.2},
                source="MyRepositories-hub/Simple-Policy-Optimization atari/trainer.py@9fdeda3 "
                "compute_policy_loss",
                note="algo spo; --epsilon; for control tasks, a mean over steps",
            ),
        ),
    ),
    policy(
        name="drpo",
        summary="DPPO with a quadratic penalty in place of the mask",
        paper="arXiv 2606.09821",
        needs=ROLLOUT,
        parameters={
            "delta": Parameter("the shift of the probability at which a token's gradient is 0", low=0.01),
            "log_ratio_clamp": replace(LOG_RATIO_CLAMP, help="clamp on the log ratio, in nats; UniRL: 20.0"),
        },
        mode="seq-mean-token-sum",
        dialects=(
            recorded(
                upstream="unirl",
                params={"delta": 12.5, "log_ratio_clamp": 20.0},
                source="Tencent-Hunyuan/UniRL unirl/algorithms/drpo.py@1a7b501 _drpo_loss",
                note="drpo_epsilon is delta; the recipe sets loss_agg_mode seq-mean-token-sum-norm with the "
                "longest response as constant (token-mean is the code's default); penalty_mu_weighted false "
                "is spo on the rollout policy",
                mode="seq-mean-token-sum-norm",
            ),
        ),
    ),
    with_ratio(
        name="kimi_k15",
        over_sequence=True,
        summary="REINFORCE with the squared log ratio of the whole response",
        paper="arXiv 2501.12599",
        parameters={"tau": TAU},
        mode="seq-mean-token-sum",
        advantage="dr_grpo",
    ),
    with_ratio(
        name="topr",
        over_sequence=True,
        gradient="score",
        summary="REINFORCE whose bad responses fade as they are unlearned",
        paper="arXiv 2503.14286",
        parameters={
            "level": Parameter(
                "whose ratio tapers: the response's product, or the token's", choices=("token", "sequence")
            )
        },
        mode="seq-mean-token-sum",
        dialects=(
            trinity(
                params={"level": "token"},
                source=f"{TRINITY}/topr_policy_loss.py",
                note="policy_loss_fn topr; advantage_threshold (0) is where a response counts as bad",
                mode="token-mean",
            ),
            roll(
                "pg_variant topr; the score, and not the advantage, says whether a response is bad; "
                "topr_positive_weight and topr_negative_weight are 1",
                {"level": "token"},
                proof=RECORDED,
            ),
        ),
    ),
    with_ratio(
        name="rec",
        gradient="score",
        summary="REINFORCE with PPO's clip as a mask, and no weight",
        paper="arXiv 2509.24203",
        parameters={
            "clip": Parameter("which tokens are dropped", choices=("none", "one-side", "two-side", "ring")),
            "weight": Parameter("the weight of a token: 1, or its ratio", choices=("none", "ratio")),
            "clip_low": Parameter("a token below 1 - clip_low is dropped", low=0, high=1),
            "clip_high": Parameter("a token above 1 + clip_high is dropped", low=0),
            "outer_low": Parameter(
                "ring: a token of A >= 0 below 1 - outer_low is kept",
                low=0,
                high=1,
                only_with=("clip", "ring"),
            ),
            "outer_high": Parameter(
                "ring: a token of A < 0 above 1 + outer_high is kept", low=0, only_with=("clip", "ring")
            ),
        },
        dialects=(
            trinity(
                params={
                    "clip": "none",
                    "weight": "none",
                    "clip_low": 0.2,
                    "clip_high": 0.2,
                    "outer_low": 0.6,
                    "outer_high": 2.0,
                },
                source=f"{TRINITY}/rec_policy_loss.py",
                note="clip_mode, weight (importance_sampling is ratio), epsilon_low, epsilon_high, "
                "epsilon_low_prime, epsilon_high_prime; nothing is clipped unless clip_mode is set; "
                "its clip of whole sequences, the weight advantage and the regularizers are not available",
            ),
        ),
    ),
    policy(
        name="opmd",
        summary="REINFORCE with smaller steps for a stronger regulariser",
        paper="arXiv 2505.17826",
        needs=("logprobs", "advantages", "mask"),
        parameters={"tau": Parameter("the loss is divided by 1 + tau", low=0)},
        mode="token-mean",
        advantage="dr_grpo",
        dialects=(
            trinity(
                params={"tau": 1.0},
                source=f"{TRINITY}/opmd_policy_loss.py",
                note="policy_loss_fn opmd",
            ),
        ),
    ),
    with_ratio(
        name="sppo",
        summary="softmax PPO: the clipped log ratio (not the preference loss)",
        paper="arXiv 2108.05828",
        parameters={
            "epsilon": Parameter("the ratio is clipped to [1 / (1 + epsilon), 1 + epsilon]", low=0.001)
        },
        dialects=(
            trinity(
                params={"epsilon": 0.3},
                source=f"{TRINITY}/sppo_loss_fn.py",
                note="policy_loss_fn sppo; the value of a clipped token is 0",
            ),
        ),
    ),
    policy(
        name="luffy",
        summary="responses of another policy, weighted by shaped probability",
        paper="arXiv 2504.14945",
        needs=("logprobs", "advantages", "mask"),
        parameters={"gamma": Parameter("the probability whose token has the largest gradient", low=1e-6)},
        mode="token-mean",
        dialects=(
            recorded(
                upstream="luffy",
                params={"gamma": 0.1},
                source="ElliottYan/LUFFY luffy/verl/verl/mix_src/mix_core_alg.py@01f4ae0 "
                "compute_token_on_off_policy_loss",
                note="off_policy_reshape p_div_p_0.1, on the tokens of prefix_mask; its scripts set "
                "loss_remove_token_mean, which divides the sum by the padded width",
            ),
        ),
    ),
    with_ratio(
        name="fipo",
        over_sequence=True,
        gradient="surrogate",
        summary="GRPO, each token weighted by how later tokens have moved",
        paper="arXiv 2603.19835",
        parameters=CLIPS
        | {
            "ratio_cap": Parameter(
                "the ratio is capped here, and a token above it does not weigh others; the authors: 10", low=1
            ),
            "half_life": Parameter("distance in tokens at which a token counts half", low=0.01),
            "weight_low": Parameter("the least weight", low=0, high=1),
            "weight_high": Parameter("the largest weight", low=1),
            "safety": Parameter("where A < 0 and the ratio is above this, the weight is at most 1", low=1),
        },
        dialects=(
            recorded(
                upstream="ms-swift",
                params=PPO_CLIPS | {"half_life": 32.0, "weight_low": 1.0, "weight_high": 1.2, "safety": 4.0},
                source="ms-swift 4.6.0 swift/rlhf_trainers/grpo_trainer.py _compute_fipo_influence, "
                "_compute_loss_and_metrics",
                note="loss_type fipo; delta is ratio_cap; fipo_decay_rate is half_life; fipo_clip_range c is "
                "weight_high = 1 + c and weight_low = 1, or 1 - c with fipo_clip_high_only false; "
                "fipo_safety_threshold is safety",
            ),
        ),
    ),
    with_ratio(
        name="aspo",
        gradient="surrogate",
        summary="PPO with the ratio turned over where A > 0",
        paper="arXiv 2510.06062",
        parameters=CLIPS | {"dual_clip": Parameter("the largest weight, which keeps its gradient", low=1)},
        dialects=(
            recorded(
                upstream="archer",
                params=PPO_CLIPS | {"dual_clip": 3.0},
                source="wizard-III/Archer2.0 verl/trainer/ppo/core_algos.py@b08d963 "
                "compute_policy_loss_archer",
                note="negative_low_entropy_clip_ratio_low and positive_low_entropy_clip_ratio_high are the "
                "clips, negative_clip_ratio_c and positive_clip_ratio_c the dual clip; tokens of high "
                "entropy have clips of 0.4 there; the value at the dual clip differs",
            ),
        ),
    ),
    with_ratio(
        name="up_grpo",
        gradient="surrogate",
        summary="REINFORCE without a bound where A > 0, GRPO elsewhere",
        paper="arXiv 2607.06987",
        parameters={
            "clip_low": CLIPS["clip_low"],
            "dual_clip": Parameter("bound on the loss where A <= 0, in units of |A|", low=1),
        },
        mode="seq-mean-token-mean",
    ),
    with_ratio(
        name="ce_gppo",
        gradient="surrogate",
        summary="PPO whose clipped tokens keep the gradient of the bound",
        paper="arXiv 2509.20712",
        parameters=CLIPS
        | {
            "beta_low": Parameter("gradient kept below the clip, in units of that at the bound", low=0),
            "beta_high": Parameter("gradient kept above the clip, in units of that at the bound", low=0),
            "dual_clip": DUAL_CLIP,
        },
        dialects=(
            recorded(
                upstream="ce-gppo",
                params={**PPO_CLIPS, "beta_low": 0.75, "beta_high": 1.0, "dual_clip": 10.0},
                source="Kwai-Klear/CE-GPPO verl/trainer/ppo/core_algos.py@10558fe "
                "compute_gppo_loss_general_beta, recipe/dapo/7B_perf_run_gppo_v1*.sh",
                note="gppo_loss_beta1 is beta_low, gppo_loss_beta2 is beta_high (0.25 and 1 in the function)",
            ),
        ),
    ),
    with_ratio(
        name="dcpo",
        summary="PPO with a clip range that is wider for unlikely tokens",
        paper="arXiv 2509.02333",
        parameters={
            "epsilon_low": Parameter("bound on (1 - r) pi below", low=0),
            "epsilon_high": Parameter("bound on (r - 1) pi above", low=0),
            "ratio_max": Parameter("the largest upper bound of the ratio", low=1),
            "dual_clip": replace(DUAL_CLIP, help="bound on the loss where A < 0, in units of |A|"),
        },
        mode="seq-mean-token-mean",
        dialects=(
            recorded(
                upstream="dcpo",
                params={"epsilon_low": 0.16, "epsilon_high": 0.2, "ratio_max": 10.0, "dual_clip": 10.0},
                source="lime-RL/DCPO verl/trainer/ppo/core_algos.py@01787b0 compute_policy_loss_dcpo",
                note="loss_mode dcpo, clip_type dynamic; clip_ratio_low, clip_ratio_high; clip_ratio_c is "
                "dual_clip, and ratio_max is it too, but at least 10; loss_agg_mode only-token-mean",
            ),
        ),
    ),
    with_ratio(
        name="cpgd",
        summary="REINFORCE with PPO's clip on the log-probability",
        paper="arXiv 2505.12504",
        parameters={
            "clip_low": replace(CLIPS["clip_low"], high=0.99),
            "clip_high": CLIPS["clip_high"],
        },
        mode="seq-mean-token-mean",
        dialects=(
            recorded(
                upstream="lightrft",
                params=PPO_CLIPS,
                source="opendilab/LightRFT lightrft/models/loss.py@49e62cb PolicyLoss",
                note="use_cpg_loss; clip_eps is both; the logarithms of the bounds are float32",
            ),
        ),
    ),
    policy(
        name="flash_reinforce",
        over_sequence=True,
        summary="importance-weighted REINFORCE on responses of small mean KL",
        paper="FlashREINFORCE, ResearchGate publication 414274571",
        needs=ROLLOUT,
        parameters={
            "delta": Parameter(
                "a response whose mean KL is above this, in nats per token, is dropped", low=0, example=0.003
            )
        },
        mode="seq-mean-token-mean",
        dialects=(
            recorded(
                upstream="openrlhf",
                source="OpenRLHF 0.11.2 openrlhf/models/loss.py PolicyLoss",
                note="--algo.advantage.is_correction_level seq, is_correction_gating binary_kl; "
                "is_correction_threshold is delta; equal at the one step of a batch, where pi is its "
                "old policy",
            ),
        ),
    ),
    policy(
        name="cppo",
        over_sequence=True,
        gradient="score",
        summary="DPPO, less room for early tokens and after a moved prefix",
        paper="arXiv 2606.10968",
        needs=ROLLOUT,
        parameters={
            "tv_max": Parameter(
                "how far a token's probability may move away from the rollout policy's", low=0
            ),
            "weight_min": Parameter("weight of the last token's move; the first one's is 1", low=0, high=1),
            "budget": Parameter("the least mean move per token that the prefix is allowed", low=0),
            "budget_factor": Parameter(
                "the largest, in units of the least; the authors' code: 5", low=1, example=5.0
            ),
            "quantile": Parameter("the quantile of the response's moves that sets it between", low=0, high=1),
            "ratio_cap": Parameter("the ratio, as a weight, is capped here; the authors' code: 20", low=1),
        },
        mode="seq-mean-token-mean",
    ),
    policy(
        name="tvpo",
        over_sequence=True,
        summary="GRPO without tokens that move a far response further away",
        paper="arXiv 2603.01365, as open-instruct adapts it",
        needs=("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"),
        parameters=CLIPS
        | {
            "threshold": Parameter(
                "mean |rho - 1| of a response above which tokens are dropped", low=0, example=0.1
            ),
            "weight_cap": Parameter("rho, as a weight, is capped here", low=1),
        },
        mode="token-mean",
        dialects=(
            recorded(
                upstream="open-instruct",
                params=PPO_CLIPS | {"weight_cap": 2.0},
                source="allenai/open-instruct open_instruct/grpo_utils.py@e6c3044 compute_rho_correction, "
                "compute_grpo_loss",
                note="rho_mask_tv_divergence; rho_mask_upper_bound is threshold (it must be above 1 there), "
                "rho_clamp_upper_bound is weight_cap; clip_lower, clip_higher",
            ),
        ),
    ),
    with_ratio(
        name="bapo",
        summary="PPO whose clip widens until good tokens have their share",
        paper="arXiv 2510.18927",
        over_batch=True,
        exceptions={
            "every_parameter_has_an_effect": "the search of a drawn batch ends on no step of the lower bound"
        },
        parameters={
            "ratio_low": Parameter("the first lower bound of the ratio", low=0, high=1),
            "ratio_low_max": Parameter("the last lower bound", low=0, high=1),
            "ratio_high": Parameter("the first upper bound of the ratio", low=1, high=10),
            "ratio_high_max": Parameter("the last upper bound", low=1, high=10),
            "step_low": replace(STEP, help="by how much the lower bound is raised at a time"),
            "step_high": replace(STEP, help="by how much the upper bound is raised at a time"),
            "share": Parameter("the share of the loss that tokens of A > 0 must have", low=0, high=1),
            "first": Parameter("which bound is raised first", choices=("high", "low")),
            "dual_clip": Parameter(
                "bound on the loss where A < 0, in units of |A|; the authors' code: 3.0", low=1
            ),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        dialects=(
            recorded(
                upstream="bapo",
                params={
                    "ratio_low": 0.6,
                    "ratio_low_max": 0.8,
                    "ratio_high": 1.2,
                    "ratio_high_max": 2.0,
                    "step_low": 0.05,
                    "step_high": 0.05,
                    "share": 0.5,
                    "first": "low",
                    "dual_clip": 3.0,
                    "log_ratio_clamp": 20.0,
                },
                source="WooooDyy/BAPO recipe/bapo/policy_loss.py@7287044 compute_policy_loss_bapo, "
                "config/bapo_trainer.yaml",
                note="ratio_lower_start, ratio_lower_max, ratio_lower_step, and so on; adv_ratio_target t is "
                "share = t / (1 + t); the sums are over all ranks",
            ),
        ),
    ),
    with_ratio(
        name="m2po",
        summary="PPO, clip set by a budget of the batch's squared log ratios",
        paper="arXiv 2510.01161",
        over_batch=True,
        gradient="surrogate",
        parameters={
            "budget": Parameter("mean squared log ratio that is allowed", low=1e-6),
            "least_low": Parameter("the lower bound is at most 1 - least_low", low=0, high=1),
            "least_high": Parameter("the upper bound is at least 1 + least_high", low=0),
        },
        dialects=(
            recorded(
                upstream="m2po",
                params={"budget": 0.04},
                source="Infini-AI-Lab/M2PO verl/trainer/ppo/core_algos.py@af54a3e compute_m2po_policy_loss",
                note="M2_budget; miniclip_low and miniclip_high (off) are least_low and least_high",
            ),
        ),
    ),
)
