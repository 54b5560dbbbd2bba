"""Advantages: how much better a rollout, or a token, did than what it is compared with."""

from composer_plugins.kernels.advantages.grouped import (
    dr_grpo,
    gpg,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    rloo,
)
from composer_plugins.kernels.advantages.whitened import (
    discounted_returns,
    gae,
    gdpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)

__all__ = [
    "discounted_returns",
    "dr_grpo",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "maxrl",
    "opo",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
]
