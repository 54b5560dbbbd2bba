"""Tinker and its cookbook: the names in `loss_fn_config` and in the recipes. It adds up what a loss returns.

Read in tinker 0.38.0 and tinker-cookbook 0.6.1. Its own losses run on its servers, and cannot be compared.
"""

from composer_plugins.frameworks.clips import BY_RATIO
from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, Framework, NamedLoss, Sets

TINKER = Framework(
    name="tinker",
    title="Tinker and its cookbook",
    release="0.38.0",
    losses=(
        NamedLoss("importance_sampling@tinker", {"loss_fn": "importance_sampling"}),
        NamedLoss("ppo@tinker", {"loss_fn": "ppo"}),
    ),
    denominators={"": "token-sum"},
    names={
        "clip_low_threshold": (Sets(("clip_low",), BY_RATIO, ONE_MINUS),),
        "clip_high_threshold": (Sets(("clip_high",), BY_RATIO, MINUS_ONE),),
        "kl_penalty_coef": (Sets(("kl_coef",), ("opd",)),),
    },
    convention="composer_plugins.testing.conventions.sums:TINKER",
)
