"""Checkouts of PRIME-RL, NeMo-RL and slime, for the tests that need one."""

from pathlib import Path

import pytest

from composer_plugins.conformance.stubs import source, variable
from composer_plugins.frameworks.registry import frameworks


def with_checkout(framework: str) -> pytest.MarkDecorator:
    """The mark of a test that is skipped without a checkout of this framework."""
    session, title = framework.replace("-", "_"), frameworks()[framework].title
    how = f"nox -s {session} -- --source DIR (or {variable(framework)}=DIR)"
    return pytest.mark.skipif(source(framework) is None, reason=f"no checkout of {title}: {how}")


def checkout(framework: str) -> Path:
    """The folder of a checkout, which a skipped test does not ask for."""
    found = source(framework)
    assert found is not None
    return found.resolve()
