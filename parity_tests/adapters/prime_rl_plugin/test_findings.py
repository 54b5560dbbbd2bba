"""The section of docs/findings.md about PRIME-RL is what `check --as prime-rl` finds in the checkout."""

from docs.generator import findings
from parity_tests.rigs.prime_rl_checkout import with_checkout


@with_checkout
def test_the_page_is_what_a_new_run_finds() -> None:
    assert findings.page("prime-rl") == findings.PAGE.read_text()
