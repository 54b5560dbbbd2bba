"""A checkout of PRIME-RL, for the tests that need one."""

from pathlib import Path

import pytest

from composer_plugins.conformance.prime_rl_claims import upstream
from composer_plugins.conformance.prime_rl_claims.upstream import SOURCE

with_checkout = pytest.mark.skipif(
    upstream.source() is None,
    reason=f"no checkout of PRIME-RL: nox -s prime_rl -- --source DIR (or {SOURCE}=DIR)",
)


def checkout() -> Path:
    """The folder of the checkout, which a skipped test does not ask for."""
    found = upstream.source()
    assert found is not None
    return found
