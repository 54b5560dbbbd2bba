"""Completion in a shell: names, dialects and kinds, without loading torch."""

import pytest

from composer_plugins.losses.choosing import find_one
from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

PROGRAM = "import sys; from composer_plugins.cli import main; sys.argv = ['composer-plugins']\n"
PROGRAM += "try: main()\nfinally: assert not {'torch', 'numpy'} & {*sys.modules}"

CISPO = [one.upstream for one in find_one("cispo", "policy").loss.dialects]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("explain cisp", ["cispo"]),
        ("explain cispo", ["cispo", *(f"cispo@{one}" for one in CISPO)]),
        ("diff cispo gsp", ["gspo", "gspo_token"]),
        ("plot gspo --kind pol", ["policy"]),
    ],
)
def test_bash_is_offered_what_may_stand_there(line: str, expected: list[str]) -> None:
    line = f"composer-plugins {line}"
    given = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = python("-c", PROGRAM, **given, _COMPOSER_PLUGINS_COMPLETE="complete_bash")
    assert not done.stderr and done.stdout.split() == expected
