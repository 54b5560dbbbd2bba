"""The config class that passes the table `algorithm.composer` to the actor's workers."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss config with the table `composer`. verl has no other way to pass it to the workers.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)
