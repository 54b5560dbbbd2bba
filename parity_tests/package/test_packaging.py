"""The checkout and the wheel claim one import name, composer_plugins, and no other."""

import zipfile
from pathlib import Path

import pytest

from composer_plugins import flat_kernels
from parity_tests.rigs.installed import built
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

FOLDERS = ("kernels", "adapters", "recipes")
# The recipes that run in a clone: in environments of the Makefile, or as files to copy.
FROM_A_CLONE = tuple(f"recipes/{name}/" for name in ("monarch", "openenv", "smollm", "tinker", "trl", "verl"))
MOST_BYTES = 900_000  # of the wheel
READ_BY_MODULES = ("health/log_rules.toml", "template/README.md", "plotting/recorded.html")
READ_BY_MODULES += ("cli/recorded.json", "recipes/trace_replay/recorded/session.jsonl")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from this checkout by way of its sdist, as a release is."""
    return zipfile.ZipFile(built(tmp_path_factory.mktemp("dist")))


def test_wheel_installs_one_import_name_with_licence_and_typing_marker(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"composer_plugins"}
    assert "composer_plugins/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("folder", ("composer_plugins", *FOLDERS))
def test_wheel_carries_every_source_file(wheel: zipfile.ZipFile, folder: str) -> None:
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]
    inside = [one.removeprefix("composer_plugins/") for one in sources if not one.startswith(FROM_A_CLONE)]
    expected = {f"composer_plugins/{name}" for name in inside}
    assert expected, f"{folder}/ has no source file"
    assert not expected - {*wheel.namelist()}, "add the folder to `packages` in pyproject.toml"


def test_wheel_carries_what_its_modules_read_beside_them(wheel: zipfile.ZipFile) -> None:
    for name in READ_BY_MODULES:
        assert f"composer_plugins/{name}" in wheel.namelist()


def test_wheel_is_small(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).stat().st_size < MOST_BYTES


def test_the_build_writes_the_names_of_all_kernels_for_type_checkers(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("composer_plugins/kernels/__init__.pyi").decode() == flat_kernels.stub()


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_points_at_the_folder(folder: str) -> None:
    link = ROOT / "composer_plugins" / folder
    remedy = "git config core.symlinks true && git checkout -- composer_plugins"
    assert link.is_symlink() and link.resolve() == ROOT / folder, f"run: {remedy}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_yields_its_name_to_an_installed_package(folder: str, tmp_path: Path) -> None:
    """Hugging Face's `kernels` and AdapterHub's `adapters` stay importable from the checkout.

    Python puts the current directory first, but a folder without __init__.py gives way to any
    package that has one. With it, transformers' own probe for `kernels` crashes here.
    """
    installed = tmp_path / folder / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    found = python("-c", f"import {folder}; print({folder}.__file__)", first=tmp_path).stdout
    assert Path(found.strip()) == installed, f"remove {folder}/__init__.py"
