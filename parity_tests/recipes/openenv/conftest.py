"""The tests of recipes/openenv need a sandbox, which a container may not permit."""

from collections.abc import Iterator

import psutil
import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.openenv.sandbox import Sandbox

REASON = ""
collect_ignore_glob: list[str] = []
try:
    Sandbox().check()
except ConfigError as error:
    REASON = f"recipes/openenv: not collected, because {error}"
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server with sessions for every test."""
    from composer_plugins.recipes.openenv.server import serving

    others = set(psutil.Process().children(recursive=True))
    with serving(Sandbox(), 32) as address:  # a batch of the training
        yield address
    assert set(psutil.Process().children(recursive=True)) <= others


def pytest_terminal_summary(terminalreporter: object) -> None:
    """Say what was not run."""
    if REASON:
        print(REASON)
