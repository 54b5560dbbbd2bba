"""verl: the catalogue's estimators and policy losses under `composer` and `composer/<name>`, by YAML alone.

    algorithm.adv_estimator=composer          # or composer/rloo ...; algorithm.composer says what it is
    actor_rollout_ref.actor.policy_loss.loss_mode=composer/cispo

verl 0.9 imports this module by its entry point (group `verl.plugins`), 0.6 to 0.8 with
`VERL_USE_EXTERNAL_MODULES=composer_plugins.adapters.verl_plugin`; 0.9 also with
`actor_rollout_ref.model.external_lib`. It registers by being imported, twice if it must be. verl swallows
the error of a plugin, and the user then meets an unknown estimator after the first rollout: so what goes
wrong is a warning here.
"""

import warnings

LOST = "algorithm.adv_estimator=composer will be unknown"
try:
    from composer_plugins.adapters.verl_plugin.registration import register, register_trainer

    register()
    LOST = "trainer.v1.trainer_mode=composer_sync will be unknown"
    register_trainer()
except Exception as error:  # whatever it is: verl would hide it
    warnings.warn(
        f"composer-plugins is not registered in verl: {type(error).__name__}: {error}. {LOST}",
        stacklevel=2,
    )
