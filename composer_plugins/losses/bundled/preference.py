"""Preference losses, of pairs and of single completions."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from composer_plugins.losses.bundled.shared import TINY, nemo_rl, trl
from composer_plugins.losses.row import Dialect, Loss, Parameter

ORACLE = "kernels/test_preference.py::test_each_loss_is_its_published_formula"
GOLDEN = "golden/test_preference.py"

TRL = "trainer/dpo_trainer.py DPOTrainer._compute_loss"
TRL_CPO = "experimental/cpo/cpo_trainer.py CPOTrainer.cpo_loss"
TRL_TPO = "experimental/tpo/tpo_trainer.py TPOTrainer._compute_loss"
MITCHELL = "eric-mitchell/direct-preference-optimization trainers.py preference_loss @f8b8c0f"

BETA = Parameter("how strongly the reference holds", low=TINY)
LABEL_SMOOTHING = Parameter("chance that a preference is labelled the wrong way", low=0, high=0.5)
MARGIN = Parameter("target margin gamma over beta", low=0)
NLL_WEIGHT = Parameter("weight of the negative log-likelihood", low=0)
SIMPO_PARAMETERS = {
    "beta": Parameter("scale of the length-averaged margin", low=TINY),
    "gamma_beta_ratio": MARGIN,
    "label_smoothing": LABEL_SMOOTHING,
}
CPO_PARAMETERS = {
    "beta": Parameter("scale of the margin", low=TINY),
    "label_smoothing": LABEL_SMOOTHING,
    "nll_weight": NLL_WEIGHT,
}
KTO_PARAMETERS = {
    "beta": BETA,
    "desirable_weight": Parameter("weight of good completions", low=0),
    "undesirable_weight": Parameter("weight of bad completions", low=0),
}
SMOOTHED_LINK = replace(LABEL_SMOOTHING, only_with=("link", "sigmoid"))
F_DIVERGENCE = {
    "divergence": Parameter("which f-divergence holds", choices=("reverse_kl", "forward_kl", "js", "alpha")),
    "alpha": Parameter(
        "of the alpha divergence: 1 is reverse_kl, 0 forward_kl", only_with=("divergence", "alpha")
    ),
}

# Fields that many rows share. A row may override them.
preference = partial(Loss, kind="preference", proof=ORACLE)
with_reference = partial(preference, needs=("chosen", "rejected", "ref_chosen", "ref_rejected"))


def dpo_trainer(loss_type: str, note: str = "", *, average: bool | None = None, **params: float) -> Dialect:
    """TRL's DPOTrainer with its defaults, compared with the installed one."""
    named = f'loss_type "{loss_type}"'
    return trl(
        params={"beta": 0.1, **params},
        source=TRL,
        note=f"{named}; {note}" if note else named,
        average=average,
    )


kto_trainer = partial(
    trl,
    params={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    source="trainer/kto_trainer.py KTOTrainer._compute_loss",
)

F_NOTE = "f_divergence_type is `divergence`, f_alpha_divergence_coef `alpha`"


def areal(note: str, **fields: Any) -> Dialect:
    """A loss_type of AReaL's DPO with its default beta."""
    return Dialect(
        upstream="areal",
        params={"beta": 0.1},
        source="inclusionAI/AReaL areal/trainer/dpo/dpo_engine.py@4aef98d compute_dpo_loss",
        proof=f"{GOLDEN}::test_dpo_and_ipo_equal_areal",
        note=note,
        **fields,
    )


def nemo_rl_dpo(note: str) -> Dialect:
    """NeMo-RL's DPOLossFn."""
    more = "; reference_policy_kl_penalty is beta; sft_loss_weight, 0 by default, adds the negative "
    more += "log-likelihood of the chosen side: a sum over tokens, or with sft_average_log_probs a mean"
    source = "NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a DPOLossFn"
    return nemo_rl(params={"beta": 0.05}, source=source, note=note + more)


MARGIN_LOSSES = (
    with_reference(
        name="dpo",
        summary="DPO; cDPO with label_smoothing, f-DPO with divergence",
        paper="arXiv 2305.18290",
        parameters={"beta": BETA, "label_smoothing": LABEL_SMOOTHING} | F_DIVERGENCE,
        dialects=(
            dpo_trainer("sigmoid", f"ignores label_smoothing; {F_NOTE}", label_smoothing=0.0),
            Dialect(
                upstream="eric-mitchell",
                params={"label_smoothing": 0.0},
                source=MITCHELL,
                proof=f"{GOLDEN}::test_dpo_and_ipo_equal_eric_mitchell",
                note="beta has no default; reference_free is a reference whose scores are 0",
            ),
            areal("loss_type sigmoid, its default; in float32"),
            nemo_rl_dpo("preference_loss_weight multiplies it"),
        ),
    ),
    with_reference(
        name="cdpo",
        summary="DPO for labels wrong with a known chance",
        paper="ericmitchell.ai/cdpo.pdf",
        parameters={
            "label_smoothing": Parameter(LABEL_SMOOTHING.help, low=0, high=0.5, example=0.1),
            "beta": BETA,
        },
        proof=f"{GOLDEN}::test_dpo_and_ipo_equal_eric_mitchell",
    ),
    with_reference(
        name="rpo",
        summary="DPO plus the likelihood of the chosen (iterative RPO)",
        paper="arXiv 2404.19733",
        needs=("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"),
        parameters={"beta": BETA, "nll_weight": NLL_WEIGHT},
        dialects=(
            Dialect(
                upstream="nemo-rl",
                params={"beta": 0.05},
                source="NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py DPOLossFn@7ea279a",
                proof=f"{GOLDEN}::test_rpo_equals_nemo_rl",
                note="reference_policy_kl_penalty is `beta`, sft_loss_weight (0 by default) `nll_weight`; "
                "without sft_average_log_probs its likelihood is a sum over the completion",
            ),
        ),
    ),
    with_reference(
        name="sigmoid_norm",
        summary="length-normalised DPO",
        paper="arXiv 2411.15124",
        parameters={"beta": BETA},
        average=True,
        dialects=(
            dpo_trainer("sigmoid_norm", "ignores label_smoothing"),
            nemo_rl_dpo("preference_average_log_probs, off by default"),
        ),
    ),
    with_reference(
        name="robust",
        summary="rDPO: unbiased under labels flipped with a known chance",
        paper="arXiv 2403.00409",
        parameters={
            "beta": BETA,
            "label_smoothing": Parameter(
                LABEL_SMOOTHING.help + ", below 0.5", low=0, high=math.nextafter(0.5, 0)
            ),
        }
        | F_DIVERGENCE,
        dialects=(dpo_trainer("robust", F_NOTE, label_smoothing=0.0),),
    ),
    with_reference(
        name="hinge",
        summary="SLiC's hinge on DPO's margin (RSO)",
        paper="arXiv 2309.06657",
        parameters={"beta": BETA} | F_DIVERGENCE,
        dialects=(dpo_trainer("hinge", F_NOTE),),
    ),
    with_reference(
        name="ipo",
        summary="the margin is pulled to 1 / (2 beta), and no further",
        paper="arXiv 2310.12036",
        parameters={"beta": Parameter("the paper's tau: the target is 1 / (2 beta)", low=TINY)},
        dialects=(
            dpo_trainer("ipo", "scores are averages over the completion", average=True),
            Dialect(
                upstream="eric-mitchell",
                source=MITCHELL,
                proof=f"{GOLDEN}::test_dpo_and_ipo_equal_eric_mitchell",
                note="scores are sums; beta has no default; label_smoothing is ignored",
                average=False,
            ),
            areal("loss_type ipo; scores are averages over the completion; in float32", average=True),
        ),
    ),
    with_reference(
        name="exo_pair",
        summary="EXO: reverse KL from the preference to a smoothed label",
        paper="arXiv 2402.00856",
        parameters={
            "beta": BETA,
            "label_smoothing": Parameter(LABEL_SMOOTHING.help + ", above 0", low=TINY, high=0.5),
        }
        | F_DIVERGENCE,
        dialects=(
            dpo_trainer(
                "exo_pair", f"refuses its default label_smoothing of 0; {F_NOTE}", label_smoothing=1e-3
            ),
        ),
    ),
    with_reference(
        name="discopop",
        summary="log-ratio modulated loss, found by search",
        paper="arXiv 2406.08414",
        parameters={
            "beta": BETA,
            "tau": Parameter("temperature of the gate between the two losses", low=TINY),
        }
        | F_DIVERGENCE,
        exceptions={
            "descent_raises_the_chosen_over_the_rejected": "the published function rises with the margin "
            "around 0"
        },
        dialects=(dpo_trainer("discopop", f"discopop_tau is `tau`; {F_NOTE}", tau=0.05),),
    ),
    *(
        with_reference(
            name=name,
            summary=summary,
            paper="arXiv 2406.05882",
            parameters={"beta": BETA, "label_smoothing": LABEL_SMOOTHING},
            over_batch=True,
            dialects=(dpo_trainer(name, label_smoothing=0.0),),
        )
        for name, summary in {
            "aot": "margins dominate the reference's; sorts over the batch",
            "aot_unpaired": "chosen rewards dominate rejected ones; sorts over the batch",
        }.items()
    ),
)

SEPARATE_LOSSES = tuple(
    with_reference(
        name=name,
        summary=summary,
        paper=paper,
        optional=("reward_shift",) if name == "bco_pair" else (),
        parameters={"beta": BETA},
        dialects=(dpo_trainer(name, "no reward_shift" if name == "bco_pair" else ""),),
    )
    for name, paper, summary in (
        ("nca_pair", "arXiv 2402.05369", "noise contrast: the chosen must not become less likely"),
        ("bco_pair", "arXiv 2404.04656", "a binary classifier of completions, on pairs"),
        ("sppo_hard", "arXiv 2405.00675", "regression of log-ratios on a sure win"),
        ("apo_zero", "arXiv 2408.06266", "anchored: for chosen completions better than the policy"),
        ("apo_down", "arXiv 2408.06266", "anchored: for chosen completions worse than the policy"),
    )
)

CALIBRATED_LOSSES = (
    with_reference(
        name="cal_dpo",
        summary="DPO whose log-ratios are pulled to +-1 / (2 beta)",
        paper="arXiv 2412.14516",
        parameters={
            "beta": Parameter("the targets of the log-ratios are +-1 / (2 beta)", low=TINY),
            "calibration_weight": Parameter("weight of the squared distances from the targets", low=0),
        },
        dialects=(
            Dialect(
                upstream="cal-dpo",
                params={"beta": 0.002, "calibration_weight": 0.5},
                source="tengxiao1/Cal-DPO scripts/dpo_trainer.py dpo_loss@7d16b46, "
                "zephyr-selm/dpo_config_full.yaml",
                proof=f"{GOLDEN}::test_cal_dpo_equals_its_authors",
                note='loss_type "Cal-DPO"; 0.1 in its dataclass',
            ),
        ),
    ),
)

REFERENCE_FREE_LOSSES = (
    preference(
        name="simpo",
        summary="reference-free, length-averaged, with a target margin",
        paper="arXiv 2405.14734",
        needs=("chosen", "rejected"),
        parameters=SIMPO_PARAMETERS
        | {
            "link": Parameter("how the margin becomes a loss", choices=("sigmoid", "hinge")),
            "label_smoothing": SMOOTHED_LINK,
        },
        average=True,
        dialects=(
            Dialect(
                upstream="official",
                params={"beta": 2.0, "gamma_beta_ratio": 0.25, "label_smoothing": 0.0, "link": "sigmoid"},
                source="princeton-nlp/SimPO scripts/simpo_trainer.py simpo_loss @1b3e8f3",
                proof=f"{GOLDEN}::test_simpo_equals_its_authors",
                note="loss_type is `link`; adds sft_weight (0) times the likelihood of the chosen",
            ),
            trl(
                params={"beta": 0.1, "gamma_beta_ratio": 5.0, "label_smoothing": 0.0},
                source=TRL_CPO,
                note="simpo_gamma 0.5 is beta * gamma_beta_ratio; cpo_alpha 0. Its default cpo_alpha of 1 "
                "adds the likelihood of the chosen: cpo_simpo@trl",
            ),
        ),
    ),
    preference(
        name="simper",
        summary="inverse perplexities: no reference and no parameter",
        paper="arXiv 2502.00883",
        needs=("chosen", "rejected"),
        average=True,
        dialects=(
            Dialect(
                upstream="simper",
                source="tengxiao1/SimPER scripts/simper_trainer.py simpo_loss@db08c97",
                proof=f"{GOLDEN}::test_simper_equals_its_authors",
                note='loss_type "SimPER"',
            ),
        ),
    ),
    preference(
        name="cpo_simpo",
        summary="SimPO plus the likelihood of the chosen",
        paper="fe1ixxu/CPO_SIMPO",
        needs=("chosen", "rejected", "chosen_nll"),
        parameters=SIMPO_PARAMETERS | {"nll_weight": NLL_WEIGHT},
        average=True,
        dialects=(
            trl(
                params={"beta": 0.1, "gamma_beta_ratio": 5.0, "label_smoothing": 0.0, "nll_weight": 1.0},
                source=TRL_CPO,
                note='loss_type "simpo"; simpo_gamma 0.5 is beta * gamma_beta_ratio, cpo_alpha `nll_weight`; '
                "its likelihood is one mean over the tokens of the batch",
            ),
        ),
    ),
    preference(
        name="alpha_po",
        summary="SimPO with another shape of reward",
        paper="arXiv 2501.03884",
        needs=("chosen", "rejected"),
        parameters={"alpha": Parameter("shape of the reward; 0 is SimPO", example=0.25)} | SIMPO_PARAMETERS,
        average=True,
        dialects=(
            trl(
                params={"alpha": 0.0, "beta": 0.1, "gamma_beta_ratio": 5.0, "label_smoothing": 0.0},
                source=TRL_CPO,
                note='loss_type "alphapo"; with its default alpha of 0 that is SimPO; simpo_gamma 0.5 is '
                "beta * gamma_beta_ratio",
            ),
        ),
    ),
    preference(
        name="cpo",
        summary="DPO without a reference, plus the likelihood of the chosen",
        paper="arXiv 2401.08417",
        needs=("chosen", "rejected", "chosen_nll"),
        parameters=CPO_PARAMETERS
        | {
            "link": Parameter("how the margin becomes a loss", choices=("sigmoid", "hinge", "square")),
            "label_smoothing": SMOOTHED_LINK,
        },
        dialects=(
            trl(
                params={"beta": 0.1, "label_smoothing": 0.0, "nll_weight": 1.0, "link": "sigmoid"},
                source=TRL_CPO,
                note='cpo_alpha is `nll_weight`; loss_type "ipo" is the link "square", on averages; its '
                "likelihood is one mean over the tokens of the batch",
            ),
        ),
    ),
    preference(
        name="orpo",
        summary="likelihood of the chosen, and a preference by odds",
        paper="arXiv 2403.07691",
        needs=("chosen", "rejected", "chosen_nll"),
        parameters={"beta": Parameter("the paper's lambda: weight of the odds ratio", low=0)},
        average=True,
        dialects=(
            trl(
                params={"beta": 0.1},
                source="experimental/orpo/orpo_trainer.py ORPOTrainer.odds_ratio_loss",
                note="its likelihood is one mean over the tokens of the batch, prompts included",
            ),
        ),
    ),
    preference(
        name="tpo",
        summary="CPO with the likelihood of a third, gold completion",
        paper="arXiv 2405.16681",
        needs=("chosen", "rejected", "gold_nll"),
        parameters=CPO_PARAMETERS,
        dialects=(
            trl(
                params={"beta": 0.01, "label_smoothing": 0.0, "nll_weight": 1.0},
                source=TRL_TPO,
                note='loss_type "sigmoid"; tpo_alpha is `nll_weight`',
            ),
        ),
    ),
    preference(
        name="tpo_l",
        summary="TPO, length-averaged, with a target margin",
        paper="arXiv 2405.16681",
        needs=("chosen", "rejected", "gold_nll"),
        parameters={"gamma_beta_ratio": Parameter(MARGIN.help, low=0, example=0.5)} | CPO_PARAMETERS,
        average=True,
        dialects=(
            trl(
                params={"gamma_beta_ratio": 50.0, "beta": 0.01, "label_smoothing": 0.0, "nll_weight": 1.0},
                source=TRL_TPO,
                note='loss_type "tpo-l"; tpo_l_gamma 0.5 is beta * gamma_beta_ratio, tpo_alpha `nll_weight`',
            ),
        ),
    ),
    preference(
        name="sft",
        summary="the likelihood of the chosen alone",
        paper="maximum likelihood",
        needs=("chosen_nll",),
        dialects=(
            trl(
                source=TRL,
                note='loss_type "sft"; one mean over the tokens of the batch',
            ),
        ),
    ),
)

UNPAIRED_LOSSES = (
    preference(
        name="kto",
        summary="a prospect-theoretic value of single completions",
        paper="arXiv 2402.01306",
        needs=("scores", "ref_scores", "desirable", "reference_kl"),
        parameters=KTO_PARAMETERS,
        dialects=(
            kto_trainer(
                note='loss_type "kto"; good completions first; reference_kl is a mean over ranks',
            ),
        ),
    ),
    preference(
        name="apo_zero_unpaired",
        summary="APO-zero of single completions: KTO anchored at 0",
        paper="arXiv 2408.06266",
        needs=("scores", "ref_scores", "desirable"),
        parameters=KTO_PARAMETERS,
        dialects=(
            kto_trainer(
                note='loss_type "apo_zero_unpaired"; good completions first',
            ),
        ),
    ),
    preference(
        name="bco",
        summary="a binary classifier of single completions",
        paper="arXiv 2404.04656",
        needs=("scores", "ref_scores", "desirable", "reward_shift"),
        parameters=KTO_PARAMETERS,
    ),
)

LOSSES = (
    *MARGIN_LOSSES,
    *SEPARATE_LOSSES,
    *CALIBRATED_LOSSES,
    *REFERENCE_FREE_LOSSES,
    *UNPAIRED_LOSSES,
)
