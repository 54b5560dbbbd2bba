"""The plugin of Axolotl that reads the options of the composer loss from the YAML file.

    plugins:
      - composer_plugins.recipes.axolotl.plugin.ComposerPlugin
    trainer_cls: composer_plugins.recipes.axolotl.trainer.ComposerAxolotlTrainer
    composer:
      policy: gspo
      hint_weight: 1.0

Axolotl replaces functions of TRL before it loads the model. The modules of our adapter import TRL's trainer,
which keeps the functions that it finds, so they are imported only after that.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.import_helper import get_cls_from_module_str
from pydantic import BaseModel

from composer_plugins.config import unknown_option
from composer_plugins.errors import ConfigError

TRAINER = "composer_plugins.recipes.axolotl.trainer.ComposerAxolotlTrainer"


class ComposerArgs(BaseModel):
    """What Axolotl's config gets in addition."""

    composer: dict[str, Any] | None = None  # the options of ComposerGRPOConfig that TRL's does not have


class ComposerPlugin(BasePlugin):
    """Adds the options of the composer loss to Axolotl's GRPO config."""

    def register(self, cfg: Any) -> None:
        """Keep the names of the keys. Axolotl drops those that it does not know."""
        self._keys = set(cfg)

    def get_input_args(self) -> str:
        """The class of the keys that the YAML file may have in addition."""
        return f"{__name__}.{ComposerArgs.__name__}"

    def get_training_args_mixin(self) -> str:
        """The class that Axolotl's GRPO config is derived from in addition."""
        return "composer_plugins.adapters.trl_mixin.ComposerGRPOConfig"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The options of the composer loss, which are checked when the config is made."""
        return cfg.composer.to_dict()

    def pre_model_load(self, cfg: Any) -> None:
        """Raise ConfigError for a YAML file whose options of the composer loss would have no effect."""
        from composer_plugins.adapters.trl_mixin import ComposerLossMixin, upstream
        from composer_plugins.adapters.trl_mixin.options import OWN

        if cfg.rl not in ("grpo", "gdpo"):
            problem = f"it is {cfg.rl and cfg.rl.value}, and the composer loss needs GRPO"
            raise ConfigError("rl", problem, "set it to grpo")
        if not cfg.composer:
            raise ConfigError("composer", "it is not set", "set the options of the composer loss below it")
        for name in self._keys.intersection(OWN):
            problem = "it stands at the top of the file, where Axolotl does not read it"
            raise ConfigError(name, problem, "move it below the key composer")
        for name in cfg.composer:
            if name in upstream.DEFAULTS:
                problem = "it is an option of TRL, and composer has only those of the composer loss"
                raise ConfigError(f"composer.{name}", problem, "move it below the key trl")
            if name not in OWN:
                error = unknown_option(name, OWN, cfg.composer.get("policy"))
                raise error.under("composer")
        chosen = get_cls_from_module_str(cfg.trainer_cls) if cfg.trainer_cls else None
        if chosen is None or not issubclass(chosen, ComposerLossMixin):
            problem = f"it is {cfg.trainer_cls}, which does not have the composer loss"
            raise ConfigError("trainer_cls", problem, f"set it to {TRAINER}, or to a class derived from it")
        # With trainer_cls set, Axolotl does not use the trainer that this option chooses.
        if (cfg.context_parallel_size or 1) > 1:
            problem = f"it is {cfg.context_parallel_size}, which needs another trainer than trainer_cls"
            raise ConfigError("context_parallel_size", problem, "remove it")
