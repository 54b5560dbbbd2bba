"""The public names of docs/status.md exist, and no other is listed by the modules themselves."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from composer_plugins import flat_kernels
from composer_plugins.cli import COMMANDS
from composer_plugins.config import ComposerConfig
from parity_tests.rigs.paths import ROOT

SECTION = (ROOT / "docs/status.md").read_text().split("## What is public\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `(composer_plugins[\w.]*)` \| (.+) \|$", SECTION, re.MULTILINE)
KERNELS = "composer_plugins.kernels"
PARTS = re.findall(r"^\| `(kernels\.[\w.]+)\(", (ROOT / "docs/writing_a_loss.md").read_text(), re.MULTILINE)


def listed(cell: str) -> set[str]:
    """The names of a row: identifiers in backticks, before the words that explain them."""
    return set(re.findall(r"`(\w+)`", re.split(r", with |, as |, for ", cell)[0]))


def defined(module: str) -> dict[str, ast.AST]:
    """What a module that imports a framework defines or imports, read and not run."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    found: dict[str, ast.AST] = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: node for one in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


@pytest.mark.parametrize(("module", "cell"), [row for row in ROWS if row[0] != f"{KERNELS}..."])
def test_public_names_exist_and_are_those_of_all(module: str, cell: str) -> None:
    names = listed(cell)
    if module.startswith("composer_plugins.adapters."):
        there = defined(module)
        exported = set(ast.literal_eval(there["__all__"])) if "__all__" in there else names  # type: ignore[arg-type]
        assert names <= there.keys() and names == exported
        return
    loaded = import_module(module)
    assert names and all(hasattr(loaded, name) for name in names)
    if module == KERNELS:
        assert names == flat_kernels.NOT_IN_CATALOGUE.keys()
    elif hasattr(loaded, "__all__"):
        assert names == set(loaded.__all__)


def test_the_parts_to_build_from_exist() -> None:
    assert len(PARTS) > 10
    for path in PARTS:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(f"composer_plugins.{module}"), name))


def test_the_page_has_every_option_and_every_command() -> None:
    (options,) = re.findall(r"^- \*\*Options\*\*.+?: (.+?)\. The page", SECTION, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", options) == list(ComposerConfig.model_fields)
    (commands,) = re.findall(r"^- \*\*Commands\*\*(.+)$", SECTION, re.MULTILINE)
    assert re.findall(r"`([\w-]+)`", commands) == list(COMMANDS)
