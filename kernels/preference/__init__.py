"""Preference losses over pairs (chosen, rejected) or single completions, on sequence scores."""

from composer_plugins.kernels.preference.dpo_family import (
    aot,
    aot_unpaired,
    cdpo,
    discopop,
    dpo,
    exo_pair,
    hinge,
    ipo,
    robust,
    sigmoid_norm,
)
from composer_plugins.kernels.preference.links import logistic
from composer_plugins.kernels.preference.reference_free import (
    alpha_po,
    cpo,
    cpo_simpo,
    orpo,
    sft,
    simpo,
    tpo,
    tpo_l,
)
from composer_plugins.kernels.preference.scores import (
    ld_logprobs,
    sequence_logprobs,
    weighted,
    wpo_weights,
)
from composer_plugins.kernels.preference.separate import apo_down, apo_zero, bco_pair, nca_pair, sppo_hard
from composer_plugins.kernels.preference.unpaired import apo_zero_unpaired, bco, kto, kto_reference_point

__all__ = [
    "alpha_po",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco",
    "bco_pair",
    "cdpo",
    "cpo",
    "cpo_simpo",
    "discopop",
    "dpo",
    "exo_pair",
    "hinge",
    "ipo",
    "kto",
    "kto_reference_point",
    "ld_logprobs",
    "logistic",
    "nca_pair",
    "orpo",
    "robust",
    "sequence_logprobs",
    "sft",
    "sigmoid_norm",
    "simpo",
    "sppo_hard",
    "tpo",
    "tpo_l",
    "weighted",
    "wpo_weights",
]
