"""What our own losses are tested with, for whoever writes another one.

`check_loss` runs every law on a loss, and `parametrize_with_checks` makes each a test of pytest. The rest
is imported by its module: `from composer_plugins.testing.assertions import assert_parity`.

- `laws`: the laws themselves, each a function of one way to call a loss
- `assertions`: comparing two results within a tolerance that follows from the dtype and the number of terms
- `settings`: every way to call a loss of the catalogue, with its values and gradients
- `inputs`: random inputs for a loss, by the names in its row
- `report`: what a set of checks found
- `strategies`: Hypothesis strategies for the same kinds of tensors (install `composer-plugins[test]`)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_plugins.testing.checking import check_loss, parametrize_with_checks

__all__ = ["check_loss", "parametrize_with_checks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer_plugins.testing import checking  # loads torch and every loss

    return getattr(checking, name)
