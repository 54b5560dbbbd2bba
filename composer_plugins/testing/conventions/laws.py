"""The laws on a loss that is one number for a batch, as most frameworks' loss functions return it.

A law of the same name in `composer_plugins.testing.laws` says the same of a loss per token. Its cause is
used here, too.
"""

from composer_plugins.testing.conventions import law, numbers, results  # noqa: F401  (they register laws)
from composer_plugins.testing.conventions.law import NOT_RUN
from composer_plugins.testing.conventions.results import FIRST, error_of
from composer_plugins.testing.laws import LAWS

__all__ = ["FIRST", "NOT_RUN", "REDUCED", "error_of"]

# Without the first no other can be looked at.
REDUCED = {FIRST: law.REDUCED[FIRST]} | law.REDUCED | {name: LAWS[name] for name in law.SAME}
