"""The config of verl's actor with our policy loss, as a worker makes it."""

from typing import Any

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.conformance.verl_claims.upstream import actor


def composer_actor(node: dict[str, Any], info: dict[str, Any] | None = None, **options: Any) -> Any:
    """verl's options and counts with this node; our policy_loss keeps the options of verl's own."""
    config = actor(info, **options)
    own = {name: value for name, value in config.policy_loss.items() if name != "loss_mode"}
    # verl's config refuses a plain assignment.
    policy_loss = ComposerPolicyLossConfig(loss_mode="composer", composer=node, **own)
    object.__setattr__(config, "policy_loss", policy_loss)
    return config
