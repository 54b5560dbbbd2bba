"""Registers our policy losses and advantage estimators in SkyRL, by name.

Call `register()` in an entry point of your own before SkyRL's `validate_cfg`. `main` does it for SkyRL's own
entry point, with trainer.override_entrypoint.
"""

NAME = "composer"


def register() -> None:
    """Register `composer` and `composer/<name>` for each policy loss and advantage that SkyRL can run.

    A second call does nothing. SkyRL raises ValueError where another package has one of these names.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry

    from composer_plugins.adapters.skyrl_loss.loss import AdvantageEstimator, PolicyLoss
    from composer_plugins.frameworks.skyrl import SKYRL
    from composer_plugins.losses.registry import losses

    available = PolicyLossRegistry.list_available()
    if NAME in available and isinstance(PolicyLossRegistry.get(NAME), PolicyLoss):
        return
    PolicyLossRegistry.register(NAME, PolicyLoss())
    AdvantageEstimatorRegistry.register(NAME, AdvantageEstimator())
    for loss in losses():
        if loss.kind == "policy" and SKYRL.runs(loss):
            PolicyLossRegistry.register(f"{NAME}/{loss.name}", PolicyLoss(loss.name))
        elif loss.kind == "advantage" and SKYRL.runs(loss):
            AdvantageEstimatorRegistry.register(f"{NAME}/{loss.name}", AdvantageEstimator(loss.name))
