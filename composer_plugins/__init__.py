"""RL losses written once, as a loss per token, and tested for equal values and gradients in TRL, verl,
PRIME-RL and five other frameworks.

`kernels`, `adapters` and `recipes` next to this file are links to the folders at the top of the
repository, where the code lives; an installed wheel holds them here. Importing this package loads
neither torch nor a framework: `from composer_plugins.kernels import dapo` loads torch, and importing
`composer_plugins.adapters.trl_mixin` TRL.
"""

from composer_plugins import flat_kernels, kernels
from composer_plugins.errors import ComposerError, ConfigError, DataError

__all__ = ["ComposerError", "ConfigError", "DataError", "__version__"]

__version__ = "0.1.0"

# The folder has no __init__.py that could define them (`flat_kernels` says why).
vars(kernels).update(__getattr__=flat_kernels.find, __dir__=flat_kernels.names)
