"""How much of the product there is: bounds that may only fall."""

import tomllib

import pytest

from parity_tests.rigs.loaded import check_loaded
from parity_tests.rigs.paths import ROOT

# Lines of .py below these folders, with room for new losses: a test adds one, as in CONTRIBUTING.md.
LINES = {
    ("composer_plugins", "adapters", "kernels", "recipes"): 50_300,
    ("adapters",): 10_900,
    ("parity_tests",): 41_700,
    ("docs/generator",): 1_640,
}


@pytest.mark.parametrize("folders", LINES, ids="+".join)
def test_the_folders_have_at_most_so_many_lines(folders: tuple[str, ...]) -> None:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= LINES[folders]


def test_prime_rls_trainer_loads_little_of_ours() -> None:
    check_loaded("adapters.prime_rl_plugin.loss", "prime_rl", 7_500)


def test_the_package_has_at_most_so_many_hard_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 8
