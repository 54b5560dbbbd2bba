"""SkyRL's config with the table `trainer.algorithm.composer`, for policy_loss_type=composer.

SkyRL rejects a key that its config class does not have, and takes a class that is derived from it.
"""

from dataclasses import dataclass, field
from typing import Any

from skyrl.train.config import AlgorithmConfig, make_config


@dataclass
class ComposerAlgorithmConfig(AlgorithmConfig):
    """SkyRL's AlgorithmConfig with the table `composer`."""

    composer: dict[str, Any] = field(default_factory=dict)


ComposerConfig = make_config(algorithm_cls=ComposerAlgorithmConfig)
