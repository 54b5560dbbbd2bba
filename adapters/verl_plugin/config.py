"""The node `composer` in verl's config: under `algorithm`, and in the policy_loss of the actor's workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from verl.workers.config import PolicyLossConfig

from composer_plugins.adapters.verl_plugin.rules import NODE
from composer_plugins.errors import ConfigError


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss config with the node `composer`, which reaches the actor's workers in no other way.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)


def node_of(config: Any) -> dict[str, Any]:
    """Return the `composer` node of a DictConfig, dataclass or dict of verl's; {} if it has none."""
    node = config.get("composer") if hasattr(config, "get") else getattr(config, "composer", None)
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if node is not None and not isinstance(node, Mapping):
        raise ConfigError(NODE, f"it is {node!r}", "write a table of options")
    return {str(key): value for key, value in (node or {}).items()}
