"""The laws: what every loss of the catalogue obeys, and what `check` examines a loss with.

Each is a function of a `Setting`, one way to call a loss, and raises `BrokenLaw` with numbers.
"""

from composer_plugins.losses.row import KINDS
from composer_plugins.testing.law import EVERY_LAW, FUNCTION, NOT_RUN, BrokenLaw, Law, NotApplicable, laws_for
from composer_plugins.testing.laws import advantages, gradients, numbers, preferences, results, tokens, traced  # noqa: F401  (each registers its laws)

__all__ = ["FUNCTION", "LAWS", "NOT_RUN", "BrokenLaw", "Law", "NotApplicable", "laws_for"]

LAWS = {one.name: one for one in EVERY_LAW if {*one.kinds} & KINDS.keys()}
