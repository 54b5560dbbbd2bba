"""Who may import whom, and what importing the package costs.

The arrows: recipes -> adapters -> kernels -> torch; the package itself (catalogue, config) stands
between adapters and kernels; one framework to an adapter; nothing -> parity_tests.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from composer_plugins.kernels import masking
from parity_tests.support.paths import ROOT

PACKAGE, KERNELS = "composer_plugins", "composer_plugins.kernels"
ADAPTERS, RECIPES = "composer_plugins.adapters", "composer_plugins.recipes"

FOLDERS = (PACKAGE, "kernels", "adapters", "recipes", "benchmarks", "parity_tests")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]} - {"numpy"}  # torch's own
LIBRARIES |= sys.stdlib_module_names

# What counts as one framework. An adapter's name begins with its framework's.
FRAMEWORKS = {
    "prime_rl": {"prime_rl", "verifiers", "numpy", "safetensors"},
    "trl": {"accelerate", "datasets", "peft", "safetensors", "transformers", "trl"},
    "verl": {"numpy", "omegaconf", "pyarrow", "ray", "tensordict", "transfer_queue", "transformers", "verl"},
}


def part_of(name: str) -> str:
    """The part of the house that a dotted name is in: one adapter, the kernels, a library ..."""
    names = name.split(".")
    if names[0] != PACKAGE:
        return names[0]
    if names[1:2] == ["adapters"]:
        # One framework's modules are one adapter: prime_rl_loss, prime_rl_stamps ...
        owner = next((key for key in FRAMEWORKS if names[2:] and names[2].startswith(key)), "")
        return f"{ADAPTERS}.{owner}" if owner else ".".join(names[:3])
    return ".".join(names[:2]) if names[1:2] in (["kernels"], ["recipes"]) else PACKAGE


def may_import(part: str, imported: str) -> bool:
    """Whether there is an arrow from one part to the other."""
    if imported in {"kernels", "adapters", "recipes"}:
        return False  # a second name for a module of ours, and another project's only name
    if "parity_tests" in (part, imported):
        return part in {"parity_tests", "benchmarks"}  # neither is shipped; both load a checkout of PRIME-RL
    if part in {RECIPES, "benchmarks"}:
        return True
    if part == KERNELS:
        return imported in {"__future__", "jaxtyping", "math", "torch", "typing", KERNELS}
    allowed = LIBRARIES | {PACKAGE, KERNELS, part}
    if part.startswith(ADAPTERS):
        adapter = part.removeprefix(f"{ADAPTERS}.")
        allowed = allowed.union(*(FRAMEWORKS[key] for key in FRAMEWORKS if adapter.startswith(key)))
    return imported in allowed


def imports(module: str, source: str, *, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """Line, full dotted name, and whether it waits for a function call, of all that is imported."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(parent: ast.AST, is_lazy: bool) -> Iterator[tuple[int, str, bool]]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name, is_lazy
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                origin = [*base, node.module] if node.module else base
                for alias in node.names:
                    yield node.lineno, ".".join([*origin, alias.name]), is_lazy
            else:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from visit(node, is_lazy or is_function)

    return visit(ast.parse(source), False)


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """One sentence for each import of a module that the architecture does not allow."""
    return [
        f"{module}, line {line}: may not import {name}"
        for line, name, is_lazy in imports(module, source, is_package=is_package)
        if not may_import(part_of(module), part_of(name))
        # The one exception: `composer-plugins demo` runs a recipe, when it is called.
        and not (module == f"{PACKAGE}.cli" and part_of(name) == RECIPES and is_lazy)
    ]


def modules() -> Iterator[tuple[str, Path]]:
    """The name and file of every module here; rglob does not follow the package's links."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = [*path.relative_to(ROOT).parent.parts, path.stem]
            if folder in {"kernels", "adapters", "recipes"}:
                names.insert(0, PACKAGE)
            yield ".".join(names).removesuffix(".__init__"), path


def test_every_import_follows_the_architecture() -> None:
    found = [
        sentence
        for module, path in modules()
        for sentence in violations(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_every_folder_is_searched_once() -> None:
    files = [path for _, path in modules()]
    assert len(files) == len({path.resolve() for path in files})
    searched = {path.relative_to(ROOT).parts[0] for path in files}
    assert searched == set(FOLDERS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (f"{KERNELS}.ppo", "import numpy"),
        (f"{KERNELS}.ppo", "import torch, os.path"),
        (f"{KERNELS}.ppo", "from composer_plugins import errors"),
        (f"{KERNELS}.ppo", "from ..errors import ComposerError"),
        (f"{KERNELS}.linear.jsd", "from ...errors import ComposerError"),
        (f"{KERNELS}.ppo", "def f():\n    import trl"),
        (f"{PACKAGE}.catalogue", "from composer_plugins.adapters import trl_mixin"),
        (f"{PACKAGE}.catalogue", "from composer_plugins import adapters"),
        (f"{PACKAGE}.catalogue", "from .recipes.codebook import task"),
        (f"{PACKAGE}.catalogue", "import trl"),
        (f"{PACKAGE}.catalogue", "import numpy"),
        (f"{PACKAGE}.cli", "from composer_plugins.recipes import codebook"),
        (f"{PACKAGE}.cli", "def f():\n    from composer_plugins.adapters import trl_mixin"),
        (f"{PACKAGE}.doctor", "def f():\n    from composer_plugins.recipes import codebook"),
        (f"{ADAPTERS}.trl_mixin.trainer", "import verl"),
        (f"{ADAPTERS}.trl_mixin.trainer", "from ..verl_plugin import estimator"),
        (f"{ADAPTERS}.trl_mixin.trainer", "from composer_plugins.recipes import codebook"),
        (f"{ADAPTERS}.new_framework", "import new_framework"),
        (f"{RECIPES}.codebook.demo", "from kernels import policy"),
        (f"{RECIPES}.codebook.demo", "from parity_tests import assertions"),
        (f"{ADAPTERS}.prime_rl_loss", "from parity_tests import assertions"),
        ("parity_tests.kernels.test_ppo", "import kernels.policy"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (f"{KERNELS}.ppo", "import math, torch.nn.functional as F\nfrom .masking import keep"),
        (f"{KERNELS}.ppo", "from composer_plugins.kernels import masking"),
        (f"{PACKAGE}.catalogue", "import pluggy, json\nfrom composer_plugins.kernels import kl"),
        (f"{PACKAGE}.cli", "def f():\n    from composer_plugins.recipes.codebook import demo"),
        (f"{ADAPTERS}.trl_mixin.trainer", "from .config import Config\nimport trl, peft, torch"),
        (f"{ADAPTERS}.trl_mixin.trainer", "from composer_plugins import catalogue"),
        (
            f"{RECIPES}.trl.grpo",
            "import tokenizers\nfrom composer_plugins.adapters import trl_mixin",
        ),
        ("parity_tests.kernels.test_ppo", "import numpy\nfrom parity_tests.support import strategies"),
    ],
)
def test_an_allowed_import_is_let_through(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    source = "from .trainer import Trainer"
    assert violations(f"{ADAPTERS}.trl_mixin", source, is_package=True) == []
    assert violations(f"{ADAPTERS}.trl_mixin", "from ..x import y", is_package=True)


@pytest.mark.parametrize("module", ["composer_plugins", "composer_plugins.cli"])
def test_importing_the_package_loads_no_torch_and_no_framework(module: str) -> None:
    """VeRL imports our plugin in every Ray process, and `composer-plugins --help` is typed often."""
    heavy = {"torch", "numpy"}.union(*FRAMEWORKS.values())
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert module in loaded
    assert not heavy & set(loaded)


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from composer_plugins.cli import main; sys.argv = ['composer-plugins', '--help']\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
    assert "torch" not in run.stderr.split()


def test_kernels_check_shapes_under_pytest_and_only_there() -> None:
    """A wrong shape that broadcasts is an error here; users do not pay for looking."""
    with pytest.raises(jaxtyping.TypeCheckError):
        masking.masked_sum(torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bool))
    program = "import sys, composer_plugins.kernels.masking; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert "composer_plugins.kernels.masking" in loaded
    assert "beartype" not in loaded
