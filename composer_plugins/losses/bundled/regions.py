"""Policy losses that mask tokens out (by region, ratio or covariance), and on-policy distillation."""

from dataclasses import replace
from functools import partial

from composer_plugins.losses.bundled.policy import OLD, ROLLOUT, ms_swift, policy, roll
from composer_plugins.losses.bundled.shared import (
    CLIPS,
    LOG_RATIO_CLAMP,
    PPO_CLIPS,
    TINY,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)
from composer_plugins.losses.row import MAX, Dialect, Parameter

TOP_K = (*ROLLOUT, "topk_logprobs", "rollout_topk_logprobs")
SUPPORT = (*ROLLOUT, "support_logprobs", "rollout_support_logprobs")

WEIGHT_CAP = Parameter("the ratio, as a weight, is capped here; Stable-RL and verl: 3", low=TINY)
FORM = Parameter(
    "the value of the loss: score is -sg(w) A log pi, ratio is -w A; the gradient is the same",
    choices=("score", "ratio"),
)
ADV_TAU = Parameter("scales the advantage", low=0)
KL_TAU = Parameter(
    "adds this times the squared log ratio at every unmasked token", low=0, weighs_a_penalty=True
)

STABLE_RL = "sail-sg/Stable-RL verl/trainer/ppo/core_algos.py compute_policy_loss_with_mask @c6af1d1"
PRIME_RL = "src/prime_rl/trainer/rl/loss.py"
REGIONS = "golden/test_regions.py"
TOP_K_PROOF = f"{REGIONS}::test_topk_losses_equal_stable_rl"
PRIME = "golden/test_prime_rl.py"

# Fields that many rows share. A row may override them.
dppo = partial(policy, gradient="score", paper="arXiv 2602.04879", needs=ROLLOUT, mode="token-mean")
covariance = partial(policy, paper="arXiv 2505.22617", over_batch=True, needs=OLD, mode="token-mean")
distillation = partial(policy, needs=("logprobs", "rollout_logprobs", "teacher_logprobs", "mask"))
stable_rl = partial(Dialect, upstream="stable-rl", proof=f"{REGIONS}::test_losses_equal_stable_rl")


def region(measure: str) -> dict[str, Parameter]:
    """How far a token's probability may move, by total variation (which is at most 1) or KL."""
    down, up = "how far down a token may move (A < 0)", "how far up a token may move (A > 0)"
    return {
        f"{measure}_low": Parameter(down, low=0),
        f"{measure}_high": Parameter(up, low=0),
    }


LOSSES = (
    dppo(
        name="dppo_tv",
        summary="REINFORCE on tokens whose probability is near the rollout's",
        optional=("region_logprobs",),
        parameters=region("tv")
        | {
            "ratio_cap": WEIGHT_CAP,
            "log_ratio_clamp": LOG_RATIO_CLAMP,
            "form": FORM,
            "adv_tau": ADV_TAU,
            "kl_tau": KL_TAU,
        },
        dialects=(
            stable_rl(
                params={"tv_low": 0.2, "tv_high": 0.2, "ratio_cap": 3.0},
                source=f"{STABLE_RL} (loss_mode dppo_binary_tv)",
                note="clip_ratio_low, clip_ratio_high, clip_ratio_c (3 in its ActorConfig, 10 in the "
                "function); its mode dppo_binary_tv_recompute is region_logprobs = old_logprobs",
            ),
            verl(
                "compute_policy_loss_dppo_tv",
                params={"tv_low": 0.2, "tv_high": 0.2, "ratio_cap": 3.0, "log_ratio_clamp": 20.0},
                note="clip_ratio_low, clip_ratio_high, clip_ratio_c (3 in its ActorConfig, 20 in the "
                "function, 10000 in its example); the rollout policy is its old_log_prob",
            ),
            skyrl(
                "dppo_policy_loss",
                params={"tv_low": 0.2, "tv_high": 0.2, "form": "ratio", "log_ratio_clamp": 20.0},
                note="policy_loss_type dppo with dppo_type binary_tv, the default; delta_low, delta_high; "
                "without rollout log-probabilities the old ones take their place",
            ),
            prime_rl(
                params={"tv_low": 0.2, "tv_high": 0.2, "form": "ratio", "adv_tau": 1.0, "kl_tau": 1e-3},
                source=f"PRIME-RL {PRIME_RL} default_loss_fn, v0.6.0 to @559b447",
                proof=f"{PRIME}::test_losses_equal_prime_rl",
                note="dppo_mask_low, dppo_mask_high; loss_weights multiply the loss per token; removed by "
                "pull request 3418 of 2026-08-27, which made ipo the default",
            ),
        ),
    ),
    dppo(
        name="dppo_kl",
        summary="as dppo_tv, measured by a Bernoulli KL",
        optional=("region_logprobs",),
        parameters=region("kl") | {"ratio_cap": WEIGHT_CAP, "log_ratio_clamp": LOG_RATIO_CLAMP, "form": FORM},
        dialects=(
            stable_rl(
                params={"kl_low": 0.2, "kl_high": 0.2, "ratio_cap": 3.0},
                source=f"{STABLE_RL} (loss_mode dppo_binary_kl)",
                note="its regions default to the actor's clip_ratio, 0.2, whatever they measure; mode "
                "dppo_binary_kl_recompute is region_logprobs = old_logprobs",
            ),
            verl(
                "compute_policy_loss_dppo_kl",
                params={"kl_low": 0.2, "kl_high": 0.2, "ratio_cap": 3.0, "log_ratio_clamp": 20.0},
                note="its regions default to the actor's clip_ratio, 0.2, whatever they measure",
            ),
            skyrl(
                "dppo_policy_loss",
                params={"kl_low": 0.2, "kl_high": 0.2, "form": "ratio", "log_ratio_clamp": 20.0},
                note="policy_loss_type dppo with dppo_type binary_kl; delta_low, delta_high default to 0.2, "
                "whatever they measure, and its documentation recommends 0.05",
            ),
        ),
    ),
    *(
        dppo(
            name=f"dppo_topk_{measure}",
            summary=summary,
            needs=TOP_K,
            parameters=region(measure) | {"ratio_cap": WEIGHT_CAP, "form": FORM},
            dialects=(
                stable_rl(
                    params={f"{measure}_low": 0.2, f"{measure}_high": 0.2, "ratio_cap": 3.0},
                    source=f"{STABLE_RL} (loss_mode dppo_topk_{measure}); "
                    "verl/workers/actor/utils.py compute_topk_kl",
                    proof=TOP_K_PROOF,
                    note="the distance is a float32 there",
                ),
            ),
            proof=TOP_K_PROOF,
        )
        for measure, summary in {
            "tv": "as dppo_tv, over the k likeliest tokens and the rest",
            "kl": "as dppo_topk_tv, measured by a KL",
        }.items()
    ),
    policy(
        name="ipo",
        gradient="surrogate",
        summary="dppo_tv with a symmetric region and a squared drift",
        paper=f"PRIME-RL {PRIME_RL} (INTELLECT policy optimisation)",
        needs=ROLLOUT,
        parameters=region("tv")
        | {"ratio_cap": WEIGHT_CAP, "form": FORM, "adv_tau": ADV_TAU, "kl_tau": KL_TAU},
        mode="token-mean",
        dialects=(
            prime_rl(
                params={"tv_low": 0.1, "tv_high": 0.1, "form": "ratio", "adv_tau": 1.0, "kl_tau": 1e-3},
                source=f"PRIME-RL {PRIME_RL} ipo_loss_fn, v0.6.0 to @559b447",
                proof=f"{PRIME}::test_losses_equal_prime_rl",
                note="ipo_threshold is both bounds; later it is eps (pull request 3418), 0.3 by default and "
                "with kl_tau 0 (pull request 3586)",
            ),
            Dialect(
                upstream="prime-rl<0.6",
                params={"tv_low": 0.2, "tv_high": 0.2, "form": "ratio", "adv_tau": 1.0, "kl_tau": 1e-3},
                source=f"PRIME-RL v0.5.0 {PRIME_RL}@63331ad default_loss_fn",
                proof=f"{PRIME}::test_losses_of_a_release_equal_prime_rl",
                note="ipo_mask_low, ipo_mask_high; its teacher_tau adds teacher_tau (log T - log pi) to the "
                "advantage",
            ),
        ),
    ),
    policy(
        name="ipo_centered",
        gradient="surrogate",
        summary="ipo, less the update that the rollout policy expects",
        paper="arXiv 2609.20807",
        needs=SUPPORT,
        parameters=region("tv") | {"ratio_cap": WEIGHT_CAP, "adv_tau": ADV_TAU, "kl_tau": KL_TAU},
        mode="token-mean",
        proof="kernels/test_regions.py::test_score_centering_is_what_a_loop_over_tokens_and_entries_makes_of_it",
    ),
    policy(
        name="kpop",
        gradient="surrogate",
        summary="dppo_kl whose region takes the KL in both directions",
        paper="ringtech.notion.site/kpop",
        needs=ROLLOUT,
        parameters={
            "kl_max": Parameter("how far a token may move, in nats, in either direction of the KL", low=0),
            "form": FORM,
            "adv_tau": ADV_TAU,
            "kl_tau": KL_TAU,
        },
        mode="token-mean",
    ),
    policy(
        name="minirl",
        gradient="score",
        summary="REINFORCE times the rollout ratio, with PPO's clip as a mask",
        paper="arXiv 2512.01374",
        needs=("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"),
        parameters={
            "clip_low": replace(
                CLIPS["clip_low"], help="a token of A < 0 stops below 1 - clip_low", example=0.2
            ),
            "clip_high": replace(
                CLIPS["clip_high"], help="a token of A > 0 stops above 1 + clip_high", example=0.2
            ),
            "ratio_cap": WEIGHT_CAP,
        },
        mode="seq-mean-token-sum",
        dialects=(
            stable_rl(
                params={"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 3.0},
                source=f"{STABLE_RL} (loss_mode ppo_recompute)",
                note="its mode ppo is old_logprobs = rollout_logprobs; token-mean by default",
                mode="token-mean",
            ),
        ),
    ),
    policy(
        name="masked_is",
        gradient="score",
        summary="REINFORCE times the rollout ratio, without extreme tokens",
        paper="arXiv 2512.16144",
        needs=ROLLOUT,
        parameters={
            # A ratio of 1, which is no change, is within every bound.
            "token_low": Parameter("a token below this ratio is dropped", low=0, high=1),
            "token_high": Parameter("a token above this ratio is dropped", low=1),
            "geo_low": Parameter("a sequence whose mean ratio is below this is dropped", low=0, high=1),
            "geo_high": Parameter("a sequence whose mean ratio is above this is dropped", low=1),
            "sequence_low": Parameter("a sequence with any token below this ratio is dropped", low=0, high=1),
            "sequence_high": Parameter("a sequence with any token above this ratio is dropped", low=1),
            "level": Parameter(
                "whose ratio is the weight: the token's, or the product",
                choices=("token", "sequence"),
            ),
            "ratio_cap": WEIGHT_CAP,
            "adv_tau": ADV_TAU,
            "kl_tau": replace(KL_TAU, help="subtracts this times the log ratio from the advantage"),
        },
        mode="token-mean",
        dialects=(
            Dialect(
                upstream="prime-rl<0.5",
                params={
                    "token_low": 0.125,
                    "token_high": 8.0,
                    "geo_low": 0.1,
                    "geo_high": 10.0,
                    "sequence_low": 0.0,
                    "sequence_high": 100.0,
                    "level": "token",
                    "adv_tau": 1.0,
                    "kl_tau": 0.0,
                },
                source=f"PRIME-RL v0.4.0 {PRIME_RL}@f870f3c default_loss_fn",
                proof=f"{PRIME}::test_losses_of_a_release_equal_prime_rl",
                note="token_mask_*, geo_mask_*, sequence_mask_*, ratio_type; with ratio_type sequence, "
                "sequence_clip_high (10) is ratio_cap; teacher_tau adds teacher_tau (log T - log pi) to the "
                "advantage",
            ),
            skyrl(
                "rollout_is_policy_loss",
                params={"token_low": 0.8, "token_high": 1.2},
                note="policy_loss_type rollout_is; eps_clip_low, eps_clip_high are 1 - token_low, "
                "token_high - 1; a ratio equal to a bound is dropped",
            ),
            roll(
                "pg_variant tis; tis_upper_bound is ratio_cap (a ratio is never below its lower bound, 0); "
                "the rollout policy is its old one; no token is dropped",
                {"token_low": 0.0, "token_high": MAX, "ratio_cap": 1.0},
            ),
        ),
    ),
    policy(
        name="opsm",
        over_sequence=True,
        summary="GRPO without sequences of A < 0 that have drifted off-policy",
        paper="arXiv 2512.02556",
        needs=("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"),
        parameters={
            "threshold": Parameter(
                "drift that drops a sequence of A < 0, in nats per token", low=0, example=0.5
            )
        }
        | CLIPS,
        mode="seq-mean-token-mean",
        dialects=(
            trl(
                params={"threshold": 0.5, "clip_low": 0.2, "clip_high": 0.2},
                source="trainer/grpo_trainer.py get_off_policy_mask, _compute_loss",
                note="off_policy_mask_threshold: off by default, 0.5 is an example in its help; loss_type "
                "(dapo by default) decides the denominator",
                mode="token-mean",
            ),
            slime(
                "compute_opsm_mask",
                "use_opsm, with opsm_delta, 1e-4, as the threshold; the drift is that from the old policy",
                threshold=1e-4,
                **PPO_CLIPS,
            ),
            ms_swift(
                "off_policy_sequence_mask_delta, off by default; the drift is from the rollout's "
                "log-probabilities where there are any; loss_type decides the denominator",
                "seq-mean-token-mean",
                threshold=0.5,
                clip_low=0.2,
                clip_high=0.2,
            ),
        ),
    ),
    covariance(
        name="clip_cov",
        summary="GRPO without a few random tokens of high covariance",
        optional=("generator", "uniform"),
        exceptions={
            f"{law}+generator": "what is drawn depends on where a token stands"
            for law in ("rows_may_come_in_any_order", "more_padding_changes_nothing")
        },
        parameters=CLIPS
        | {
            "cov_ratio": Parameter("share of the unmasked tokens that lose their loss", low=0, high=1),
            "cov_low": Parameter("only tokens of more covariance are drawn"),
            "cov_high": Parameter("only tokens of less covariance are drawn"),
        },
        dialects=(
            verl(
                "compute_policy_loss_clip_cov",
                params=PPO_CLIPS | {"cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
                note="clip_cov_ratio, clip_cov_lb, clip_cov_ub; it draws from the global random state",
            ),
            skyrl(
                "compute_policy_loss_clip_cov",
                params=PPO_CLIPS | {"cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
                note="policy_loss_type clip_cov; clip_cov.clip_ratio, clip_cov_lb, clip_cov_ub; the "
                "advantages are divided by the denominator before the covariance is compared; it draws from "
                "the global random state",
            ),
        ),
    ),
    covariance(
        name="kl_cov",
        summary="policy gradient, penalty on the tokens of highest covariance",
        parameters={
            "cov_ratio": Parameter("share of the unmasked tokens with the penalty", low=0, high=1),
            "kl_coef": Parameter("weight of |log ratio| on these tokens", low=0),
        },
        dialects=(
            verl(
                "compute_policy_loss_kl_cov",
                params={"cov_ratio": 2e-4, "kl_coef": 0.1},
                note="kl_cov_ratio, ppo_kl_coef (0.1 in its configuration, 1 in the function)",
            ),
            skyrl(
                "compute_policy_loss_kl_cov",
                params={"cov_ratio": 0.2, "kl_coef": 1.0},
                note="policy_loss_type kl_cov; kl_cov_frac, ppo_kl_coef; the advantages are divided by the "
                "denominator, and the penalty is not",
            ),
        ),
    ),
    distillation(
        name="opd",
        summary="policy gradient on a teacher's log-ratio of sampled tokens",
        paper="thinkingmachines.ai/blog/on-policy-distillation",
        optional=("advantages",),
        parameters={"kl_coef": Parameter("weight of the teacher relative to the task", low=0)},
        mode="token-sum",
        dialects=(
            Dialect(
                upstream="tinker",
                params={"kl_coef": 1.0},
                source="tinker-cookbook distillation/train_on_policy.py incorporate_kl_penalty@9dfcc3a",
                proof=f"{REGIONS}::test_opd_equals_tinkers_cookbook",
                note="kl_penalty_coef is kl_coef; a kl_discount_factor above 0 is not available; the "
                "advantages are the cookbook's, the loss on them (importance_sampling) is the service's",
            ),
        ),
    ),
    distillation(
        name="ref_kl",
        exceptions={
            "descent_raises_the_tokens_with_positive_advantages": "advantages only bound which tokens count"
        },
        gradient="surrogate",
        summary="as opd, in a one-sided trust region and with a squared drift",
        paper=f"PRIME-RL {PRIME_RL}",
        optional=("advantages",),
        parameters=region("tv") | {"kl_tau": KL_TAU, "form": FORM},
        mode="token-mean",
        dialects=(
            prime_rl(
                params={"tv_low": 0.2, "kl_tau": 1e-3, "form": "ratio"},
                source=f"PRIME-RL {PRIME_RL} ref_kl_loss_fn, v0.7.0 to @559b447",
                proof=f"{PRIME}::test_losses_equal_prime_rl",
                note="its constants are in the code; the teacher is its ref_logprobs; without advantages",
            ),
            Dialect(
                upstream="prime-rl<0.7",
                params={"tv_low": 0.2, "tv_high": 0.2, "kl_tau": 1e-3, "form": "ratio"},
                optional=("advantages",),
                source=f"PRIME-RL v0.6.0 {PRIME_RL}@38494cc opd_loss_fn",
                proof=f"{PRIME}::test_losses_of_a_release_equal_prime_rl",
                note="called opd; the task's advantages choose the side of its region",
            ),
        ),
    ),
    distillation(
        name="iw_opd",
        over_sequence=True,
        summary="on-policy distillation that weighs early disagreement more",
        paper="arXiv 2606.22600",
        parameters={
            "gamma": Parameter("the first token weighs 1 + gamma", low=0),
            "eps": Parameter("least total disagreement of a sequence", low=TINY),
        },
        mode="token-mean",
        dialects=(
            trl(
                params={"gamma": 0.5, "eps": 1e-8},
                source="experimental/iw_opd/iw_opd_trainer.py _compute_iw_opd_loss",
                note="iw_opd_gamma, iw_opd_epsilon",
            ),
        ),
    ),
)
