"""The config class that passes `algorithm.composer` to the actor's workers, where `loss.py` reads it."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig

from composer_plugins.adapters.verl_plugin.options import check_name


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss config with the table `composer`. verl has no other way to pass it to the workers.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError where another package has one of our names, before its loss runs in a worker."""
        check_name()
