"""The node `composer` in verl's config: under `algorithm`, and in the policy_loss of the actor's workers."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss config with the node `composer`, which reaches the actor's workers in no other way.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)
