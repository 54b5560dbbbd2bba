"""`pytest` at the top of the repository collects what the environment can run, and stops at none of it."""

import pytest

from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough


def test_the_tests_are_collected_where_no_optional_package_is_installed() -> None:
    """What needs a missing package is left out: an import error would stop pytest before the first test."""
    words = ("parity_tests.rigs.without_extras", "--collect-only", "--quiet", "-p", "no:cacheprovider")
    done = python("-m", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "parity_tests/kernels/test_masking.py::" in done.stdout
