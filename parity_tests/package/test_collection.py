"""`pytest` at the top of the repository collects what the environment can run, and stops at none of it."""

import pytest

from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

# What the session kernels has beside `composer-plugins[test]`, for pictures and the site.
ABSENT = "PIL babel click dateutil fontTools kiwisolver latex2mathml markdown matplotlib mkdocs playwright "
ABSENT += "pyparsing pymdownx requests urllib3 ziafont ziamath"
PROGRAM = "import pytest, sys; sys.modules.update(dict.fromkeys(sys.argv.pop().split()));"
PROGRAM += "sys.exit(pytest.main(['--collect-only', '--quiet', '-p', 'no:cacheprovider']))"


def test_the_tests_are_collected_where_no_optional_package_is_installed() -> None:
    """What needs a missing package is left out: an import error would stop pytest before the first test."""
    done = python("-c", PROGRAM, ABSENT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "parity_tests/kernels/test_masking.py::" in done.stdout
