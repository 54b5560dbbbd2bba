"""For a moment: what has moved to `composer_plugins.objective`."""

from composer_plugins.objective.keys import *  # noqa: F403
from composer_plugins.objective.objective import *  # noqa: F403
