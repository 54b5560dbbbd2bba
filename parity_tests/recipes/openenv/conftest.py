"""What the tests of recipes/openenv share."""

from collections.abc import Iterator

import psutil
import pytest

from composer_plugins.recipes.openenv.server import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server with sessions for every test."""
    others = set(psutil.Process().children(recursive=True))
    with serving(32) as address:  # a batch of the training
        yield address
    assert set(psutil.Process().children(recursive=True)) <= others
