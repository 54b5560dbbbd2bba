"""Preference losses over pairs (chosen, rejected) or single completions, on sequence scores."""

from composer_plugins.kernels.preference.dpo_family import *  # noqa: F403
from composer_plugins.kernels.preference.links import *  # noqa: F403
from composer_plugins.kernels.preference.reference_free import *  # noqa: F403
from composer_plugins.kernels.preference.scores import *  # noqa: F403
from composer_plugins.kernels.preference.separate import *  # noqa: F403
from composer_plugins.kernels.preference.unpaired import *  # noqa: F403
