"""Preference losses over pairs (chosen, rejected), on sequence scores, one loss per pair."""

from composer_plugins.kernels.preference.pairs import (
    dpo,
    logistic,
    sequence_logprobs,
    simpo,
)

__all__ = ["dpo", "logistic", "sequence_logprobs", "simpo"]
