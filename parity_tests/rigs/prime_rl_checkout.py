"""A checkout of PRIME-RL, for the tests that need one."""

from pathlib import Path

from parity_tests.rigs import checkouts

with_checkout = checkouts.with_checkout("prime-rl")


def checkout() -> Path:
    """The folder of the checkout, which a skipped test does not ask for."""
    return checkouts.checkout("prime-rl")
