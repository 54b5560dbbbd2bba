"""The composer loss inside TRL's `GRPOTrainer` (TRL 1.9 to 1.16): policy, hint and replay.

    from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer

or, in front of a trainer of one's own, `class MyTrainer(ComposerLossMixin, MyGRPOTrainer)`.
"""

from composer_plugins.adapters.trl_mixin.mixin import ComposerGRPOTrainer, ComposerLossMixin
from composer_plugins.adapters.trl_mixin.options import ComposerGRPOConfig, ComposerParser

__all__ = ["ComposerGRPOConfig", "ComposerGRPOTrainer", "ComposerLossMixin", "ComposerParser"]
