"""SkyRL's training with our losses and estimators in its registries.

    python -m skyrl.train.entrypoints.main_base trainer.algorithm.policy_loss_type=composer/cispo \
        trainer.override_entrypoint=composer_plugins.adapters.skyrl_loss.main ...

SkyRL's own entry point calls `main` here. It takes SkyRL's options, and ours in `trainer.algorithm.composer`.
"""

import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> Any:
    """Check the config, register our losses, and train as SkyRL's own entry point does."""
    import ray
    from skyrl.train.entrypoints.main_base import skyrl_entrypoint
    from skyrl.train.utils import initialize_ray, validate_cfg

    from composer_plugins.adapters.skyrl_loss.config import ComposerConfig
    from composer_plugins.adapters.skyrl_loss.migration import check
    from composer_plugins.adapters.skyrl_loss.register import register
    from composer_plugins.frameworks.skyrl import Key

    register()
    given = sys.argv[1:] if arguments is None else arguments
    options = [one for one in given if not one.startswith(f"{Key.ENTRYPOINT}=")]
    config: Any = ComposerConfig.from_cli_overrides(options)
    check(config)
    validate_cfg(config)
    initialize_ray(config)
    return ray.get(skyrl_entrypoint.remote(config))


if __name__ == "__main__":
    main()
