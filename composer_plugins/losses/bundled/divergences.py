"""Distillation divergences."""

from dataclasses import replace
from functools import partial

from composer_plugins.losses.bundled.shared import TINY, VERL_CLAIM, nemo_rl, trl
from composer_plugins.losses.row import Dialect, Loss, Parameter, Value

LOGITS = ("student_logits", "teacher_logits", "mask")
TOP_K = ("student_logits", "teacher_topk_logprobs", "teacher_topk_ids", "mask")

GOLDEN, UNIT = "golden/test_divergences.py", "kernels/test_divergences.py"
PARTS = "kernels/test_divergences_parts.py"
TAIDS = f"{GOLDEN}::test_divergences_equal_taids_repository"
DISTILLM = f"{GOLDEN}::test_divergences_equal_distillm"
OPSD = "siyan-zhao/OPSD opsd_trainer.py generalized_jsd_loss@{}"
SDPO = "lasgroup/SDPO verl/trainer/ppo/core_algos.py compute_self_distillation_loss@0e6d510"
SERVER = "experimental/server_distillation/server_distillation_trainer.py"

# Fields that many rows share. A row may override them.
divergence = partial(Loss, kind="divergence", needs=LOGITS)
opsd = partial(Dialect, upstream="opsd", proof=f"{GOLDEN}::test_divergences_equal_opsd")
sdpo = partial(Dialect, upstream="sdpo", proof=f"{GOLDEN}::test_sdpo_equals_its_authors")

TEACHER_WEIGHT = Parameter("the teacher's weight: 0 forward KL, 1 reverse KL", low=0, high=1)
VALUE = Parameter("a KL, or larger by the teacher's entropy", choices=("kl", "cross-entropy"))
ENTRY_CLIP = Parameter("bound on each summand over the vocabulary, in nats; OPSD: 0.05")
RATIO_CAP = Parameter(
    "cap on the ratio of the student to what it was, with old_logprobs; SDPO: 2.0",
    low=TINY,
)
REST = Parameter(
    "with a top k, the probability of all other entries: renormalised scales the k to a sum of 1, raw leaves "
    "it out, tail compares it as one more entry",
    choices=("renormalised", "raw", "tail"),
)
SUPPORT = {  # the temperature, and the part of the vocabulary that is compared
    "temperature": Parameter("divides both logits", low=1e-3),
    "top_k": Parameter("compare this many entries; none: the vocabulary", low=1, integer=True),
    "top_k_of": Parameter(
        "whose largest entries these are", choices=("teacher", "student"), only_with=("top_k",)
    ),
    "rest": replace(REST, only_with=("top_k",)),
}
TOP_K_SUPPORT = {  # the same where only the teacher's top k are given
    "rest": REST,
    "temperature": Parameter("divides the student's logits", low=1e-3),
    "logprob_floor": Parameter("least log-probability of both sides, in nats; verl: -10.0", high=0),
}


def distillm(function: str, note: str = "", **params: Value) -> Dialect:
    """The dialect of a function in DistiLLM's losses.py."""
    source = f"jongwooko/distillm distillm/losses.py {function}@d47e77f"
    return Dialect(upstream="distillm", params=params, source=source, proof=DISTILLM, note=note)


def taid(file: str, note: str, proof: str = TAIDS, **params: Value) -> Dialect:
    """The dialect of a class in a file of TAID's losses."""
    source = f"SakanaAI/TAID src/distil_losses/{file}.py@a062892"
    return Dialect(upstream="taid", params=params, source=source, proof=proof, note=note)


def nemo_rl_kl(kind: str) -> Dialect:
    """A kl_type of NeMo-RL's DistillationLossFn."""
    note = f"kl_type {kind} (its default, mixed, is half of each), over the teacher's k largest entries, in "
    note += "which both are normalised; zero_outside_topk adds -100 for the rest of the student"
    source = "NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a DistillationLossFn"
    return nemo_rl(source=source, note=note)


def skew(whose: str) -> Parameter:
    """A weight in a mixture that both models enter."""
    return Parameter(f"the {whose}'s weight in the mixture", low=TINY, high=1 - 2**-53)


TO_THE_TEACHER, CLIPPED = "descent_moves_the_student_to_the_teacher", "a clipped entry has no gradient"
FLOORED = {f"{TO_THE_TEACHER}(logprob_floor=-0.5)": "an entry below the floor has no gradient"}

LOSSES = (
    divergence(
        name="forward_kl",
        summary="KL(teacher || student), mean-seeking",
        paper="arXiv 2306.13649",
        parameters=SUPPORT | {"value": VALUE, "entry_clip": ENTRY_CLIP},
        exceptions={f"{TO_THE_TEACHER}(entry_clip=0.5)": CLIPPED, f"{TO_THE_TEACHER}@opsd": CLIPPED},
        proof=f"{UNIT}::test_jsd_equals_plain_loops",
        dialects=(
            distillm(
                "forward_kl",
                "called a forward KL upstream; its mean over no token is NaN, ours 0",
                value="cross-entropy",
            ),
            taid("fkl", "class ForwardKL", value="cross-entropy"),
            opsd(
                params={"temperature": 1.1, "entry_clip": 0.05},
                source=OPSD.format("8ae338dc") + " and its scripts",
                note="beta=0 of generalized_jsd_loss; entry_clip is token_clip there",
            ),
            nemo_rl_kl("forward"),
        ),
    ),
    divergence(
        name="reverse_kl",
        summary="KL(student || teacher), mode-seeking",
        paper="arXiv 2306.08543",
        parameters=SUPPORT | {"entry_clip": ENTRY_CLIP},
        proof=f"{UNIT}::test_jsd_equals_plain_loops",
        dialects=(
            distillm("reverse_kl"),
            taid("rkl", "class ReverseKL"),
            trl(
                source="trainer/distillation_trainer.py, kernels/chunked_divergence.py",
                note="DistillationTrainer's beta=1.0; from hidden states, and a mean over all tokens",
            ),
            nemo_rl_kl("reverse"),
        ),
    ),
    divergence(
        name="jsd",
        summary="generalized Jensen-Shannon divergence",
        paper="arXiv 2306.13649",
        parameters={"beta": TEACHER_WEIGHT} | SUPPORT | {"entry_clip": ENTRY_CLIP},
        proof=f"{UNIT}::test_jsd_equals_plain_loops",
        dialects=(
            trl(
                params={"beta": 0.5, "temperature": 0.9},
                source="experimental/gkd/gkd_trainer.py generalized_jsd_loss",
                note="GKDTrainer's defaults; softmax in the dtype of the logits",
            ),
            opsd(
                params={"beta": 0.5, "temperature": 1.0},
                source=OPSD.format("590ec26"),
                note="top_k is the teacher's, renormalised; entry_clip is token_clip",
            ),
            distillm(
                "js_distance",
                "lam=0.9 weights the student: beta = 1 - lam, which at 0 and 1 is 0 there",
                beta=0.1,
            ),
            taid("js", "class JS, whose teacher_weight is beta", beta=0.1),
            Dialect(
                upstream="liger",
                params={"beta": 0.5, "temperature": 1.0},
                source="linkedin/Liger-Kernel src/liger_kernel/chunked_loss/jsd_loss.py@ead96b6",
                proof=f"{GOLDEN}::test_jsd_equals_liger",
                note="by default half of it (weight_soft_loss) and half of the cross-entropy with the labels "
                "(weight_hard_loss), which is in float32 and at temperature 1",
            ),
        ),
    ),
    divergence(
        name="skewed_forward_kl",
        summary="KL(teacher || a little teacher in the student)",
        paper="arXiv 2402.03898",
        parameters={"skew": skew("teacher"), "value": VALUE} | SUPPORT,
        proof=DISTILLM,
        dialects=(
            distillm("skewed_forward_kl", "lam weights the teacher", skew=0.1, value="cross-entropy"),
            taid(
                "skew_fkl",
                "class SkewForwardKL, whose target_weight is skew",
                skew=0.1,
                value="cross-entropy",
            ),
        ),
    ),
    divergence(
        name="skewed_reverse_kl",
        summary="KL(student || a little student in the teacher)",
        paper="arXiv 2402.03898",
        parameters={"skew": skew("student")} | SUPPORT,
        proof=DISTILLM,
        dialects=(
            distillm("skewed_reverse_kl", "lam weights the student", skew=0.1),
            taid("skew_rkl", "class SkewReverseKL, whose target_weight is skew", skew=0.1),
        ),
    ),
    divergence(
        name="symmetric_kl",
        summary="weighted sum of forward and reverse KL",
        paper="arXiv 2402.03898",
        parameters={"reverse_weight": Parameter("weight of the reverse KL", low=0, high=1), "value": VALUE}
        | SUPPORT,
        proof=DISTILLM,
        dialects=(
            distillm("symmetric_kl", "lam is reverse_weight", reverse_weight=0.9, value="cross-entropy"),
        ),
    ),
    divergence(
        name="tv",
        summary="total variation distance",
        paper="arXiv 2307.15190",
        parameters=SUPPORT,
        proof=DISTILLM,
        dialects=(
            distillm("tv_distance"),
            taid("tvd", "class TVD"),
        ),
    ),
    divergence(
        name="adaptive_kl",
        gradient="surrogate",
        summary="forward KL for the teacher's head, reverse KL for its tail",
        paper="arXiv 2404.02657",
        parameters={
            "head_mass": Parameter("probability that the teacher's head has at most", low=0, high=1),
            "weights": Parameter("how the two are weighed", choices=("paper", "taid")),
            "value": VALUE,
        }
        | SUPPORT,
        exceptions={
            f"entry_that_is_impossible_on_both_sides_contributes_nothing{setting}": "the head is found by "
            "rank and used by position, as upstream does"
            for setting in ("@taid", "(weights='taid')")
        },
        proof=f"{PARTS}::test_adaptive_kl_equals_plain_loops",
        dialects=(
            taid(
                "adaptive_kl",
                "class AdaptiveKL: head_threshold is head_mass; the head is another set of entries "
                "there, and the gradient flows through the weights",
                head_mass=0.5,
                weights="taid",
                value="cross-entropy",
            ),
        ),
    ),
    divergence(
        name="forward_kl_topk",
        summary="forward KL from the teacher's k largest log-probabilities",
        paper="arXiv 2306.13649",
        needs=TOP_K,
        parameters=TOP_K_SUPPORT
        | {
            "non_negative": Parameter("cut the loss at 0; verl: true", choices=(True, False)),
            "value_cap": Parameter("bound on the loss, in nats; verl: 10.0", low=0),
        },
        exceptions={
            "every_parameter_has_an_effect": "non_negative: only with rest='raw', or with a logprob_floor, "
            "is the loss ever negative"
        }
        | FLOORED,
        proof=f"{PARTS}::test_given_top_k_equals_that_of_the_logits",
        dialects=(
            Dialect(
                upstream="verl",
                params={"rest": "raw", "logprob_floor": -10.0, "non_negative": True, "value_cap": 10.0},
                source="verl 0.9.1 trainer/distillation/fsdp/losses.py compute_forward_kl_topk",
                proof=VERL_CLAIM,
                note="log_prob_min_clamp, loss_max_clamp; with use_policy_gradient (its default) it is a "
                "reward and not this loss",
            ),
            trl(
                params={"rest": "tail"},
                source=f"{SERVER} _compute_server_forward_kl_loss",
                note="ServerDistillationTrainer's beta=0; loss_top_k is the number of entries, loss_add_tail "
                "(on by default) the tail: without it, renormalised",
            ),
        ),
    ),
    divergence(
        name="reverse_kl_topk",
        summary="reverse KL of the teacher's top k, with a tail bucket",
        paper="arXiv 2608.14728",
        needs=TOP_K,
        parameters=TOP_K_SUPPORT,
        exceptions=FLOORED,
        proof=f"{PARTS}::test_given_top_k_equals_that_of_the_logits",
        dialects=(
            Dialect(
                upstream="tinker",
                params={"rest": "renormalised"},
                source="tinker-cookbook distillation/sdft.py:614 reverse_kl_custom_loss@9dfcc3a",
                proof=f"{GOLDEN}::test_reverse_kl_topk_equals_tinker",
                note="the sum over positions",
            ),
            trl(
                params={"rest": "tail"},
                source=f"{SERVER} _compute_sparse_top_1_divergence_loss",
                note="ServerDistillationTrainer's beta=1, its default: one entry, the sampled token, and the "
                "tail",
            ),
        ),
    ),
    divergence(
        name="generalized_reverse_kl_topk",
        summary="reverse KL of k entries that need not sum to 1, at least 0",
        paper="arXiv 2606.30406",
        needs=TOP_K,
        parameters={"temperature": TOP_K_SUPPORT["temperature"]},
        proof=f"{PARTS}::test_generalized_reverse_kl_topk_equals_plain_loops",
    ),
    divergence(
        name="symmetric_kl_topk",
        summary="weighted forward and reverse KL of the teacher's top k",
        paper="NVIDIA-NeMo/RL",
        needs=TOP_K,
        parameters={
            "reverse_weight": Parameter("weight of the reverse KL", low=0, high=1),
            "rest": REST,
            "temperature": TOP_K_SUPPORT["temperature"],
        },
        proof=f"{PARTS}::test_given_top_k_equals_that_of_the_logits",
        dialects=(
            Dialect(
                upstream="nemo-rl",
                params={"reverse_weight": 0.5, "rest": "renormalised"},
                source="NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py DistillationLossFn@7ea279a",
                proof=f"{GOLDEN}::test_symmetric_kl_topk_equals_nemo_rl",
                note="kl_type mixed, its default, without zero_outside_topk; mixed_kl_weight is "
                "1 - reverse_weight",
            ),
        ),
    ),
    divergence(
        name="sampled_token",
        gradient="surrogate",
        summary="reverse KL from the sampled token alone",
        paper="arXiv 2601.20802",
        needs=("student_logprobs", "teacher_logprobs", "mask"),
        optional=("old_logprobs",),
        parameters={
            "estimator": Parameter("score function, or a KL estimator", choices=("score", "k2", "k3")),
            "log_ratio_clamp": Parameter(
                "clamp on k3's log ratio, in nats; verl: 20.0", low=TINY, only_with=("estimator", "k3")
            ),
            "value_cap": Parameter(
                "clamp on k3, in nats; verl: 10.0", low=TINY, only_with=("estimator", "k3")
            ),
            "ratio_cap": RATIO_CAP,
        },
        proof=f"{UNIT}::test_sampled_token_has_the_gradient_of_reverse_kl_in_expectation",
        dialects=(
            sdpo(
                params={"ratio_cap": 2.0},
                source=SDPO,
                note="full_logit_distillation=False; is_clip is ratio_cap",
            ),
            trl(
                params={"ratio_cap": 2.0},
                source="experimental/sdpo/sdpo_trainer.py, loss_utils.py (sdft: the same file)",
                note="distillation_mode=sampled_token, its default; the mean over rows, empty ones included",
            ),
            opsd(
                source="siyan-zhao/OPSD opsd_trainer.py@590ec26, the thinking machines branch",
                proof=f"{GOLDEN}::test_sampled_token_equals_opsd",
                note="A = sg(log T - log S) and -A log S: temperature divides both logits before; a mean "
                "over tokens, NaN where there is none",
            ),
            Dialect(
                upstream="verl",
                params={"estimator": "k3", "log_ratio_clamp": 20.0, "value_cap": 10.0},
                source="verl 0.9.1 trainer/distillation/losses.py, core_algos.py kl_penalty",
                proof=VERL_CLAIM,
                note="loss_mode=k3 with use_policy_gradient=False; by default it is a reward",
            ),
        ),
    ),
    divergence(
        name="sdpo",
        summary="JSD on the student's top k, weighted by a capped ratio",
        paper="arXiv 2601.20802",
        optional=("student_logprobs", "old_logprobs"),
        parameters={"alpha": TEACHER_WEIGHT} | SUPPORT | {"ratio_cap": RATIO_CAP},
        detached=("student_logprobs",),  # one side of a ratio
        proof=f"{GOLDEN}::test_sdpo_equals_its_authors",
        dialects=(
            sdpo(
                params={"alpha": 0.5, "top_k": 100, "rest": "tail", "ratio_cap": 2.0},
                source=SDPO + ", verl/trainer/config/actor/actor.yaml",
                note="distillation_topk, distillation_add_tail (rest), is_clip (ratio_cap); token-mean",
            ),
            trl(
                params={"alpha": 1.0, "rest": "renormalised", "ratio_cap": 2.0},
                source="experimental/sdpo/loss_utils.py (sdft: the same file)",
                note="distillation_mode=topk_logits, whose top_k has no default; the mean over all rows",
            ),
        ),
    ),
    divergence(
        name="alpha_beta",
        summary="both KLs and all between them, by two exponents",
        paper="arXiv 2505.04560",
        parameters={
            "alpha": Parameter("exponent of the teacher; 0 is a reverse KL", low=0),
            "beta": Parameter("exponent of the student; 0 is a forward KL", low=0),
        }
        | SUPPORT,
        proof=f"{GOLDEN}::test_alpha_beta_equals_its_authors",
        dialects=(
            Dialect(
                upstream="abkd",
                params={"alpha": 0.5, "beta": 0.5},
                source="ghwang-s/abkd distillation_llm/distillm/losses.py ab_div@df81318",
                proof=f"{GOLDEN}::test_alpha_beta_equals_its_authors",
                note="ab_alpha and ab_beta, 0.5 by default; in float32",
            ),
        ),
    ),
    divergence(
        name="todi",
        gradient="surrogate",
        summary="both KLs, mixed at each entry by teacher over student",
        paper="arXiv 2505.16297",
        parameters=SUPPORT,
        proof=f"{GOLDEN}::test_todi_equals_its_authors",
        dialects=(
            Dialect(
                upstream="todi",
                source="jungseongryong/ToDi code/criterions/various_divergence.py compute_ToDi@45f1f8b",
                proof=f"{GOLDEN}::test_todi_equals_its_authors",
                note="the sum over tokens; kd_temp is temperature; in float32",
            ),
        ),
    ),
    divergence(
        name="uld",
        summary="distance of sorted probabilities, for another tokenizer",
        paper="arXiv 2402.12030",
        parameters={"temperature": SUPPORT["temperature"]},
        exceptions={
            TO_THE_TEACHER: "it compares sorted probabilities, and the step is towards the unsorted teacher"
        },
        proof=f"{PARTS}::test_uld_equals_plain_loops",
        dialects=(
            trl(
                source="experimental/gold/gold_trainer.py ULDLoss",
                note="GOLDTrainer's use_uld_loss with uld_distillation_weight 1.0 and without its hybrid and "
                "extended forms; the mean over a completion's tokens, and then over all rows",
            ),
        ),
    ),
    divergence(
        name="entropy_gated_kl",
        summary="forward KL where the teacher's entropy is high",
        paper="arXiv 2603.07079",
        parameters={"min_entropy": Parameter("least entropy of the teacher, in nats", low=0, example=1.0)}
        | SUPPORT,
        proof=f"{PARTS}::test_the_gate_is_the_entropy_of_the_teacher",
    ),
    divergence(
        name="taid",
        gradient="surrogate",
        path="composer_plugins.kernels.taid:taid",
        summary="cross-entropy to the teacher, mixed with the student",
        paper="arXiv 2501.16937",
        parameters={"t": Parameter("the teacher's weight in the logits", low=0, high=1, example=0.4)},
        proof="kernels/test_taid.py::test_loss_and_its_kl_equal_plain_loops",
        dialects=(
            taid(
                "taid",
                "t walks from 0.4 to 1.0 there: kernels.taid.step",
                proof="kernels/test_taid.py::test_taid_equals_upstream",
                t=0.4,
            ),
        ),
    ),
)
