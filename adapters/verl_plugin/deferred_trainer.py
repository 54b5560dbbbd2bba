"""Importing this module registers composer_sync, whose own module is loaded where verl makes the trainer."""

from importlib import import_module
from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from composer_plugins.adapters.verl_plugin.options import TRAINER
from composer_plugins.adapters.verl_plugin.upstream import TRAINER_MODULE


@register_trainer(TRAINER)
class ComposerSync(PPOTrainerSync):
    """Stands in verl's registry for `sync_trainer.trainer.ComposerTrainer`, and makes it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return import_module(TRAINER_MODULE).ComposerTrainer(*args, **kwargs)
