"""The laws on a loss that is one number for a batch, as most frameworks' loss functions return it.

A law of the same name in `composer_plugins.testing.laws` says the same of a loss per token. Its cause is
used here, too.
"""

from composer_plugins.testing.conventions import law, numbers, results  # noqa: F401  (they register laws)
from composer_plugins.testing.conventions.law import NOT_RUN, ONLY_FOR
from composer_plugins.testing.conventions.results import FIRST, error_of
from composer_plugins.testing.laws import LAWS, Law

__all__ = ["FIRST", "NOT_RUN", "ONLY_FOR", "REDUCED", "error_of", "laws_of"]

# Without the first no other can be looked at.
REDUCED = {FIRST: law.REDUCED[FIRST]} | law.REDUCED | {name: LAWS[name] for name in law.SAME}


def laws_of(framework: str) -> dict[str, Law]:
    """The laws on one number that are run for a framework."""
    return {name: law for name, law in REDUCED.items() if framework in ONLY_FOR.get(name, (framework,))}
