"""Completion in a shell: names, dialects and the values of filters, without loading torch."""

from importlib import import_module
from pathlib import Path

import pytest

from composer_plugins.cli import completion
from composer_plugins.frameworks.registry import conventions
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.law import EVERY_LAW
from composer_plugins.testing.laws import LAWS
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

PROGRAM = "import sys; from composer_plugins.cli import main; sys.argv = ['composer-plugins']\n"
PROGRAM += "try: main()\nfinally: assert not {'torch', 'numpy'} & {*sys.modules}"

CISPO = [one.upstream for one in find_one("cispo", "policy").loss.dialects]


def completions(line: str, shell: str = "bash", path: Path = ROOT) -> list[str]:
    """What the shell is offered for the last word of a line, whose words are parted by blanks."""
    given = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_COMPOSER_PLUGINS_COMPLETE": f"complete_{shell}",
    }
    done = python("-c", PROGRAM, first=path, **given)
    assert not done.stderr, done.stderr
    return [name.partition("\t")[0] for name in done.stdout.split("\n") if name]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("composer-plugins explain cisp", ["cispo"]),
        ("composer-plugins explain cispo", ["cispo", *(f"cispo@{one}" for one in CISPO)]),
        # bash cuts at "@", and replaces what stands after it
        ("composer-plugins explain cispo @ t", ["trl", "trinity-rft"]),
        ("composer-plugins explain cispo @", CISPO),
        ("composer-plugins diff cispo @ trl cispo @ ve", ["verl"]),
        ("composer-plugins diff cispo @ trl gsp", ["gspo", "gspo_token"]),
        ("composer-plugins check da", ["dapo"]),
        ("composer-plugins list --kind pol", ["policy"]),
        ("composer-plugins plot cispo @ t", ["trl", "trinity-rft"]),
        ("composer-plugins plot gspo --kind pol", ["policy"]),
        ("composer-plugins check grpo --kind adv", ["advantage"]),
        ("composer-plugins check grpo --only more_pad", ["more_padding_changes_nothing"]),
        ("composer-plugins check grpo --as t", ["trl", "tinker", "torchtitan", "torch"]),
        ("composer-plugins conform v", ["verl"]),
        ("composer-plugins list --needs ref_c", ["ref_chosen"]),
        ("composer-plugins list --framework p", ["prime-rl"]),
        ("composer-plugins list --dialects-of verl", ["verl", "verl<0.7.1"]),
    ],
)
def test_bash_is_offered_what_may_stand_there(line: str, expected: list[str]) -> None:
    assert completions(line) == expected


def test_the_names_that_are_read_in_sources_are_those_that_the_modules_have() -> None:
    import_module("composer_plugins.testing.laws.of_trainers")  # no other module of laws imports it
    assert {*completion.complete_law("")} == {law.name for law in EVERY_LAW} >= {*LAWS}
    assert [*completion.complete_convention("")] == [*conventions()]


def test_other_shells_are_offered_whole_names() -> None:
    assert completions("composer-plugins explain cispo@tr", shell="fish") == [
        "cispo@trl",
        "cispo@trinity-rft",
    ]


PLUGIN = """
from composer_plugins.losses.row import Dialect, Loss
from composer_plugins.hookspecs import hookimpl

@hookimpl
def register_losses(register):
    dialects = (Dialect(upstream="acme", source="a file", proof=""),)
    for name in ("quite_mine", "quite_ours", None):
        register(Loss(name=name, kind="policy", path="needs_torch:f", summary="a loss of mine", paper="",
                      needs=("logprobs",), mode="token-mean", dialects=dialects))
"""


def test_losses_of_installed_plugins_are_offered_where_their_rows_need_no_torch(tmp_path: Path) -> None:
    info = tmp_path / "acme_losses-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-losses\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[composer_plugins]\na = acme_losses\nb = needs_torch\n")
    prints = "import warnings\nprint('loaded')\nwarnings.warn('x')"
    (tmp_path / "acme_losses.py").write_text(f"{prints}\n{PLUGIN}")
    (tmp_path / "needs_torch.py").write_text(f"import torch\n{PLUGIN.replace('quite', 'quite_not')}")
    assert completions("composer-plugins explain quite", path=tmp_path) == ["quite_mine", "quite_ours"]
    assert completions("composer-plugins plot quite_mine @", path=tmp_path) == ["acme"]
    assert completions("composer-plugins list --dialects-of ac", path=tmp_path) == ["acme"]
