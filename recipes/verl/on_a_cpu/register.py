"""What each of verl's processes imports: it registers the platform, the engine and the rollout engine."""

import os

from composer_plugins.recipes.verl.on_a_cpu import PLATFORM

if os.environ.get("VERL_PLATFORM") == PLATFORM:
    from composer_plugins.recipes.verl.on_a_cpu import device, rollout  # noqa: F401  they register
