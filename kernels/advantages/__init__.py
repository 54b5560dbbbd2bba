"""Advantages: how much better a rollout, or a token, did than what it is compared with."""

from composer_plugins.kernels.advantages.grouped import *  # noqa: F403
from composer_plugins.kernels.advantages.optimal_baseline import *  # noqa: F403
from composer_plugins.kernels.advantages.success import *  # noqa: F403
from composer_plugins.kernels.advantages.whitened import *  # noqa: F403
