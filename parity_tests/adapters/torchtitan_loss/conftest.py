"""Our loss on the installed torchtitan, or on doubles of its contract."""

from collections.abc import Iterator
from typing import Any

import pytest

from parity_tests.rigs import torchtitan_doubles


@pytest.fixture(scope="session")
def loss_module() -> Iterator[Any]:
    """`composer_plugins.adapters.torchtitan_loss.loss`, which imports torchtitan."""
    with torchtitan_doubles.adapter() as module:
        yield module
