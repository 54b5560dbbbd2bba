"""KL estimators, rollout corrections and aggregation modes."""

from composer_plugins.catalogue import Loss

LOSSES: tuple[Loss, ...] = ()
