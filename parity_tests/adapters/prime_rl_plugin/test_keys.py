"""The keys of PRIME-RL's configs: each is in a table of the framework.

They were recorded from its classes of two releases (`cases/prime_rl_keys.json`), and with a checkout they are
read from it again.
"""

import json

import pytest

from composer_plugins.adapters.prime_rl_plugin.keys import KNOWN_KEYS
from parity_tests.rigs.paths import TESTS
from parity_tests.rigs.prime_rl_checkout import checkout, with_checkout
from parity_tests.rigs.prime_rl_keys import keys

RECORDED = json.loads((TESTS / "cases" / "prime_rl_keys.json").read_text())["keys"]
KEYS = {key: releases.split() for releases, listed in RECORDED.items() for key in listed.split()}
RELEASES = ("0.8", "0.8.1.dev52")


@with_checkout
def test_the_recorded_keys_are_those_of_the_checkout() -> None:
    found = keys(checkout())
    recorded = [{key for key, releases in KEYS.items() if release in releases} for release in RELEASES]
    assert found == min(recorded, key=lambda one: len(one ^ found))


@pytest.mark.parametrize("release", RELEASES)
def test_every_key_is_in_a_table(release: str) -> None:
    """`migrate` says that nothing differs only where it knows each of these keys."""
    found = {key for key, releases in KEYS.items() if release in releases}
    known = KNOWN_KEYS | {"trainer.loss"}
    covered = {key for key in found if any(f"{key}.".startswith(f"{one}.") for one in known)}
    tables = {key for key in found if any(one.startswith(f"{key}.") for one in known)}
    assert len(found) > 300 and sorted(found - covered - tables) == []
