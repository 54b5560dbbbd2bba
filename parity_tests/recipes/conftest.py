"""What the tests of several recipes share."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from composer_plugins.recipes.smollm.model import Loaded


@pytest.fixture(scope="module")
def smollm() -> "Loaded":
    """The model of the wheel."""
    from composer_plugins.recipes.smollm.model import load  # not every recipe has its packages

    return load(None, "cpu")
