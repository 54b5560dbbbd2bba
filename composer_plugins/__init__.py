"""Write an RL loss once, as per-token mathematics; run it in every RL framework.

`kernels`, `adapters` and `recipes` beside this file are links to the folders at the top of the
repository, where the code lives; an installed wheel holds them here. Importing this package loads
neither torch nor a framework: import `composer_plugins.kernels.policy` or
`composer_plugins.adapters.trl_mixin` for that.
"""

from composer_plugins.errors import ComposerError, ConfigError, DataError

__all__ = ["ComposerError", "ConfigError", "DataError", "__version__"]

__version__ = "0.1.0"
