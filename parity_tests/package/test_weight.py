"""How much of the product there is: bounds that may only fall."""

import ast
import tomllib
from collections.abc import Iterator

import pytest

from parity_tests.rigs.loaded import check_loaded
from parity_tests.rigs.paths import ROOT

# Lines of .py below these folders, with room for the example of CONTRIBUTING.md, which a test adds to a copy.
LINES = {
    ("composer_plugins", "adapters", "kernels", "recipes"): 47_850,
    ("adapters",): 10_890,
    ("parity_tests",): 38_900,
    ("docs/generator",): 1_360,
}
CONSTRUCTED = ("ConfigError", "DataError", "Finding")
DEPENDENCIES = 8


def files(*folders: str) -> Iterator[str]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.read_text()


@pytest.mark.parametrize("folders", LINES, ids="+".join)
def test_the_folders_have_at_most_so_many_lines(folders: tuple[str, ...]) -> None:
    assert sum(len(text.splitlines()) for text in files(*folders)) <= LINES[folders]


def test_prime_rls_trainer_loads_little_of_ours() -> None:
    check_loaded("adapters.prime_rl_plugin.loss", "prime_rl", 7_500)


def test_errors_and_findings_are_made_in_at_most_so_many_places() -> None:
    calls = [
        node
        for text in files("composer_plugins", "adapters", "kernels", "recipes")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CONSTRUCTED
    ]
    assert len(calls) <= 530


def test_a_loss_is_chosen_in_one_module() -> None:
    chosen = {
        path.relative_to(ROOT).as_posix()
        for folder in ("composer_plugins", "adapters", "recipes")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("choose_policy", "choose_advantage")
    }
    assert chosen - {"composer_plugins/config.py"} == {"composer_plugins/objective/asking.py"}


def test_the_package_has_at_most_so_many_hard_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= DEPENDENCIES
