"""Importing this module registers our estimators, policy losses and composer_sync in verl.

verl 0.9 imports it by its entry point (group `verl.plugins`), verl 0.8 by
`VERL_USE_EXTERNAL_MODULES=composer_plugins.adapters.verl_plugin.register`, and 0.9 also by
`actor_rollout_ref.model.external_lib`. verl hides the error of a plugin; the user would see only an unknown
estimator, after the first rollout. So an error here becomes a warning, and `FAILURE` keeps it for the doctor.
"""

import warnings
from importlib import import_module

from composer_plugins.adapters.verl_plugin.upstream import DEFERRED_TRAINER, check_release, has_v1_trainers
from composer_plugins.errors import ConfigError

NAME = "composer"
FAILURE = ""


def register() -> None:
    """Register `composer` and `composer/<name>` for every estimator and policy loss that verl can run.

    A second call does nothing. Raises ConfigError where another package has the name `composer`, and in a
    verl that is too old.
    """
    check_release()
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est, register_policy_loss

    from composer_plugins.adapters.verl_plugin.estimators import estimator
    from composer_plugins.adapters.verl_plugin.loss import policy_loss
    from composer_plugins.adapters.verl_plugin.options import check_name
    from composer_plugins.frameworks.verl import VERL
    from composer_plugins.losses.registry import losses

    check_name()
    if NAME in ADV_ESTIMATOR_REGISTRY:
        return
    register_adv_est(NAME)(estimator(None))
    register_policy_loss(NAME)(policy_loss(None))
    for loss in losses():
        if loss.kind == "advantage" and VERL.runs(loss):
            register_adv_est(f"{NAME}/{loss.name}")(estimator(loss.name))
        elif loss.kind == "policy" and VERL.runs(loss):
            register_policy_loss(f"{NAME}/{loss.name}")(policy_loss(loss.name))


UNKNOWN = "algorithm.adv_estimator=composer"
try:
    register()
    UNKNOWN = "trainer.v1.trainer_mode=composer_sync"
    if has_v1_trainers():
        import_module(DEFERRED_TRAINER)
except Exception as error:  # of every kind, because verl would hide it
    FAILURE = f"{type(error).__name__}: {error}"
    so = "" if isinstance(error, ConfigError) else f", so {UNKNOWN} will be unknown"
    warnings.warn(f"composer-plugins is not registered in verl{so}: {FAILURE}", stacklevel=2)
