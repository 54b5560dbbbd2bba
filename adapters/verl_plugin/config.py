"""Where verl keeps the node `composer`: in the algorithm's config, and in the workers' policy_loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from verl.workers.config import PolicyLossConfig

from composer_plugins.adapters.verl_parts.rules import NODE
from composer_plugins.errors import ConfigError


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss with the node `composer`, which reaches the actor's workers in no other way.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)


def node_of(config: Any) -> dict[str, Any]:
    """The `composer` node of a config of verl's, {} if there is none: DictConfig, dataclass or dict."""
    node = config.get("composer") if hasattr(config, "get") else getattr(config, "composer", None)
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if node is not None and not isinstance(node, Mapping):
        raise ConfigError(f"{NODE} is {node!r}; wanted a table of options")
    return {str(key): value for key, value in (node or {}).items()}
