"""Putting the catalogue's losses into verl's registries, under names that no loss of verl's has."""

from importlib import import_module
from importlib.util import find_spec

from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est, register_policy_loss

from composer_plugins.adapters.verl_plugin.estimators import estimator
from composer_plugins.adapters.verl_plugin.policy import policy_loss
from composer_plugins.bundled.adapters import VERL
from composer_plugins.plugins import losses

NAME = "composer"
TRAINER = "composer_plugins.adapters.verl_plugin.trainer"  # registers composer_sync when imported


def register() -> None:
    """Register `composer` and `composer/<name>` for every estimator and policy loss that verl can feed.

    Twice is once: verl refuses another function under a name that it has.
    """
    if NAME in ADV_ESTIMATOR_REGISTRY:
        return
    register_adv_est(NAME)(estimator(None))
    register_policy_loss(NAME)(policy_loss(None))
    for loss in losses():
        if not VERL.runs(loss):
            continue
        if loss.kind == "advantage":
            register_adv_est(f"{NAME}/{loss.name}")(estimator(loss.name))
        elif loss.kind == "policy":
            register_policy_loss(f"{NAME}/{loss.name}")(policy_loss(loss.name))


def register_trainer() -> None:
    """Register composer_sync where verl has trainers to choose from (0.9) and their TransferQueue."""
    if find_spec("transfer_queue") and find_spec("verl.trainer.ppo.v1"):
        import_module(TRAINER)
