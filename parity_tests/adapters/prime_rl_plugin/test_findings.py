"""The section of docs/findings.md about PRIME-RL is what `check --as prime-rl` finds in the checkout."""

import pytest

from composer_plugins.conformance.prime_rl_claims import upstream as prime_rl_live
from docs.generator.written import part

pytestmark = pytest.mark.skipif(
    prime_rl_live.source() is None,
    reason="no checkout of PRIME-RL: nox -s prime_rl -- --source DIR",
)


def test_the_page_is_what_a_new_run_finds() -> None:
    part("docs/findings.md", "prime-rl").check()
