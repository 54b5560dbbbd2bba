"""The keys of PRIME-RL's configs by release: each is in a table of the framework, with its releases.

They were recorded from its classes of six releases (`cases/prime_rl_keys.json`), and with a checkout they are
read from it again.
"""

import json

import pytest

from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.prime_rl import KNOWN_KEYS, LIFETIMES, NO_BEARING, RELEASES
from parity_tests.rigs.paths import TESTS
from parity_tests.rigs.prime_rl_checkout import checkout, with_checkout
from parity_tests.rigs.prime_rl_keys import keys

RECORDED = json.loads((TESTS / "cases" / "prime_rl_keys.json").read_text())["keys"]
KEYS = {key: releases.split() for releases, listed in RECORDED.items() for key in listed.split()}
# Keys without a field, which a release takes all the same, with the last such release.
TAKEN = {"orchestrator.env": "0.7", "orchestrator.sampling": "0.7", "orchestrator.client": "0.6"}
TAKEN |= {"toml_files": "0.4"}


@with_checkout
def test_the_recorded_keys_are_those_of_the_checkout() -> None:
    found = keys(checkout())
    recorded = [{key for key, releases in KEYS.items() if release in releases} for release in RELEASES]
    assert found == min(recorded, key=lambda one: len(one ^ found))


@pytest.mark.parametrize("release", RELEASES)
def test_every_key_is_in_a_table(release: str) -> None:
    """`migrate` says that nothing differs only where it knows each of these keys."""
    found = {key for key, releases in KEYS.items() if release in releases}
    known = KNOWN_KEYS | {"trainer.loss", "toml_files"}
    covered = {key for key in found if any(f"{key}.".startswith(f"{one}.") for one in known)}
    tables = {key for key in found if any(one.startswith(f"{key}.") for one in known)}
    inherited = {key for key in found if key.endswith(".toml_files")}  # of every class of 0.4
    assert len(found) > 300 and sorted(found - covered - tables - inherited) == []


def test_the_releases_of_each_key_are_recorded() -> None:
    """Those of options without a bearing are compared by the first two names of their keys."""
    compared = 0
    for key, releases in KEYS.items():
        bears = any(f"{key}.".startswith(f"{one}.") for one in KNOWN_KEYS - NO_BEARING)
        is_below = key.startswith("trainer.loss.") or (not bears and key.count(".") > 1)
        if key == "clean" or is_below or key not in KNOWN_KEYS and key not in LIFETIMES:  # clean came back
            continue
        entry = next((one for one in (key, key.rpartition(".")[0]) if one in LIFETIMES), "")
        last = TAKEN.get(entry, releases[-1])
        assert prime_rl.lifetime(key) == (releases[0], last), key
        compared += 1
    assert compared > 150
    assert sorted(LIFETIMES.keys() - KEYS.keys()) == []


def test_what_has_the_place_of_a_key_in_another_release_is_a_key_of_that_release() -> None:
    listed = {one for same in prime_rl.SAME_IN_OTHERS for one in same}
    assert sorted(listed - KEYS.keys()) == []
