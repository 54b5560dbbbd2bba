"""PRIME-RL: any loss of the catalogue by one line of TOML, with a hint and a replay channel beside it.

    [trainer.loss]
    type = "custom"
    import_path = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
    [trainer.loss.kwargs]
    policy = "cispo"
    old_policy = "rollout"

`stamps` and `stored_stamps` bring hints and pairs to the loss, `store` keeps them. `upstream` has what the
adapter relies on in PRIME-RL, v0.4 to @559b447. The user's page is docs/prime_rl.md.
"""

from composer_plugins.adapters.prime_rl_plugin.loss import (
    LossOutputs,
    cispo,
    dapo,
    dppo,
    grpo,
    gspo,
    icepop,
    ipo,
    loss_fn,
    sapo,
    tis,
)

__all__ = [
    "LossOutputs",
    "cispo",
    "dapo",
    "dppo",
    "grpo",
    "gspo",
    "icepop",
    "ipo",
    "loss_fn",
    "sapo",
    "tis",
]
