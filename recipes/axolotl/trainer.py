"""The class that the YAML file names as `trainer_cls`.

Axolotl makes its GRPO config, with the options of the registered plugins, when this module is imported. So
the plugin must not import it before it is registered.
"""

from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.utils.logging import get_logger

from composer_plugins.adapters.trl_mixin import ComposerLossMixin

LOG = get_logger("axolotl.composer")  # Axolotl prints INFO lines of its own loggers only


class ComposerAxolotlTrainer(ComposerLossMixin, AxolotlGRPOTrainer):
    """Axolotl's GRPO trainer with the composer loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        LOG.info(self._describe())
