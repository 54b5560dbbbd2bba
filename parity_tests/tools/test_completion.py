"""Completion in a shell: names, dialects and the values of filters, without loading torch."""

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
        ("check grpo --as t", ["trl", "tinker", "torchtitan", "torch"]),
        ("conform v", ["verl"]),
        ("list --needs ref_c", ["ref_chosen"]),
        ("list --framework p", ["prime-rl"]),
        ("list --dialects-of verl", ["verl", "verl<0.7.1"]),
    ],
)
def test_bash_is_offered_what_may_stand_there(line: str, expected: list[str]) -> None:
    line = f"composer-plugins {line}"
    given = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = python("-c", PROGRAM, **given, _COMPOSER_PLUGINS_COMPLETE="complete_bash")
    assert not done.stderr and done.stdout.split() == expected
