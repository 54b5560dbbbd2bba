"""The laws: what every loss of the catalogue obeys, and what `check` examines a loss with.

Each is a function of a `Setting`, one way to call a loss, and raises `BrokenLaw` with the numbers.
"""

from composer_plugins.testing.laws import advantages, gradients, numbers, preferences, results, tokens, traced  # noqa: F401  (each registers its laws)
from composer_plugins.testing.laws.law import LAWS, BrokenLaw, Law, NotApplicable

__all__ = ["LAWS", "BrokenLaw", "Law", "NotApplicable"]
