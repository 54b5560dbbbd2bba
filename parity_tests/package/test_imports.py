"""Who may import whom, and what importing the package costs.

The arrows: cli, tools -> adapters -> objective -> frameworks -> losses -> kernels -> torch; recipes ->
adapters; one framework to an adapter; nothing -> parity_tests. No module imports itself by way of others.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import pytest
import torch

from composer_plugins.kernels import masking
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python

PACKAGE, KERNELS = "composer_plugins", "composer_plugins.kernels"
ADAPTERS, RECIPES = "composer_plugins.adapters", "composer_plugins.recipes"
TESTING, CONFORMANCE = "composer_plugins.testing", "composer_plugins.conformance"
PLOTTING, TEACHER = "composer_plugins.plotting", "composer_plugins.teacher"

TEMPLATE = ROOT / PACKAGE / "template"
FOLDERS = (PACKAGE, "kernels", "adapters", "recipes", "benchmarks", "parity_tests")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in PROJECT["dependencies"]}
LIBRARIES = LIBRARIES - {"numpy", "pyyaml"} | {"yaml"} | sys.stdlib_module_names  # numpy is torch's own

# What kernels use of the standard library.
PURE = ("contextlib", "collections", "functools", "inspect", "math", "typing")

# By adapter, the libraries of its one framework.
FRAMEWORKS = {
    "nemo_rl_loss": {"nemo_rl"},
    "prime_rl_plugin": {"prime_rl", "verifiers", "numpy"},
    "tinker_loss": {"tinker"},
    "slime_loss": {"slime", "miles"},
    "skyrl_loss": {"ray", "skyrl"},
    "torchtitan_loss": {"torchtitan"},
    "trl_mixin": {"accelerate", "datasets", "deepspeed", "packaging", "peft", "safetensors", "transformers"}
    | {"tokenizers", "trl"},
    "verl_plugin": {"omegaconf", "ray", "tensordict", "transfer_queue", "transformers", "verl"}
    | {"datasets", "numpy", "pyarrow"},
}

# By sub-package of conformance, the libraries of the framework that its claims are about.
CLAIMED = {
    "nemo_rl_claims": {"nemo_rl"},
    "slime_claims": {"slime"},
    "skyrl_claims": {"skyrl", "typing_extensions"},
    "torchtitan_claims": {"torchtitan"},
    "trl_claims": {"datasets", "tokenizers", "transformers", "trl"},
    "verl_claims": {"numpy", "tensordict", "verl"},
}

# What a function may import, when it is called: `demo` runs a recipe, `check` the laws, `conform` the claims,
# `plot` draws.
LAZILY = {
    f"{PACKAGE}.cli": (RECIPES, TESTING, CONFORMANCE, PLOTTING, TEACHER, "tokenizers"),
    f"{PACKAGE}.batches": ("safetensors",),
    f"{TESTING}.checking": ("pytest",),
}


def part_of(name: str) -> str:
    """The part of the architecture that a dotted name is in: one adapter, the kernels, a library ..."""
    names = name.split(".")
    if names[0] != PACKAGE:
        return names[0]
    if names[1:2] == ["adapters"]:
        return ".".join(names[:3])
    if names[1:2] == ["conformance"]:
        return ".".join(names[: 3 if names[2:] and names[2] in CLAIMED else 2])
    has_own_part = names[1:2] in (["kernels"], ["recipes"], ["testing"], ["plotting"], ["teacher"])
    return ".".join(names[:2]) if has_own_part else PACKAGE


OURS = LIBRARIES | {PACKAGE, KERNELS}  # what any part may import
MAY_IMPORT = {
    KERNELS: {"torch", "jaxtyping", *PURE},
    TESTING: OURS | {"hypothesis"},
    PLOTTING: OURS | {TESTING, "matplotlib"},
    **{f"{ADAPTERS}.{name}": OURS | libraries for name, libraries in FRAMEWORKS.items()},
    **{f"{CONFORMANCE}.{name}": OURS | {TESTING, CONFORMANCE} | own for name, own in CLAIMED.items()},
    CONFORMANCE: OURS | {TESTING},
}


def may_import(part: str, imported: str) -> bool:
    """Whether there is an arrow from one part to the other."""
    if imported in {"kernels", "adapters", "recipes"}:
        return False  # a second name for a module of ours, and another project's only name
    if "parity_tests" in (part, imported):
        return part == "parity_tests"
    if part in {RECIPES, "benchmarks", imported}:
        return True
    compares = part.startswith(CONFORMANCE) and imported.startswith(ADAPTERS)
    return compares or imported in MAY_IMPORT.get(part, OURS)


class Import(NamedTuple):
    """A name that a module imports, and whether it does so when it is imported itself."""

    line: int
    name: str
    in_function: bool = False
    for_types: bool = False


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, with its whole name."""
    package = module if is_package else module.rpartition(".")[0]
    tree = ast.parse(source)
    found = [*ast.walk(tree)]
    functions = [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in found if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    lazy, for_types = ({one for node in part for one in ast.walk(node)} for part in (functions, tests))
    for node in found:
        origin = ""
        if isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package) + "."
        for name in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            yield Import(node.lineno, origin + name.name, node in lazy, node in for_types)


def violations(module: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """One sentence for each import of a module that the architecture does not allow."""
    lazily = next((parts for name, parts in LAZILY.items() if module.startswith(name)), ())
    for one in imports(module, source, is_package=is_package):
        part = part_of(one.name)
        is_allowed = (one.in_function or one.for_types) and part in lazily
        if not is_allowed and not may_import(part_of(module), part):
            yield f"{module}, line {one.line}: may not import {one.name}"


def modules() -> Iterator[tuple[str, Path]]:
    """The name and file of every module here; rglob does not follow the package's links."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(TEMPLATE):  # a third party's, when `new-plugin` has copied it
                continue
            names = [*path.relative_to(ROOT).parent.parts, path.stem]
            if folder in {"kernels", "adapters", "recipes"}:
                names.insert(0, PACKAGE)
            yield ".".join(names).removesuffix(".__init__"), path


def test_every_import_follows_the_architecture() -> None:
    files = [*modules()]
    found = [
        sentence
        for module, path in files
        for sentence in violations(module, path.read_text(), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)
    assert len(files) == len({path.resolve() for _, path in files})  # no folder is searched twice
    assert {path.relative_to(ROOT).parts[0] for _, path in files} == set(FOLDERS)


# The floors of the package, from the ground up. A module imports its own floor and those below it.
FLOORS = (
    ("kernels",),
    ("errors", "hookspecs"),
    ("losses", "flat_kernels", ""),  # "" is the package itself
    ("frameworks", "doctor", "calling_convention"),
    ("objective", "config", "columns", "batches", "health"),
    ("adapters", "testing"),
    ("conformance", "comparing", "plotting", "teacher"),
    ("recipes",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def imported(module: str, path: Path, known: set[str]) -> set[str]:
    """The modules of this package that a module imports, inside functions too, but not for types alone."""
    every = imports(module, path.read_text(), is_package=path.name == "__init__.py")
    names = {one.name for one in every if not one.for_types}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known - {module}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    shipped = {name: path for name, path in modules() if name.partition(".")[0] == PACKAGE}
    return {name: imported(name, path, set(shipped)) for name, path in shipped.items()}


def test_no_module_imports_itself_by_way_of_others(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 250
    TopologicalSorter(graph).prepare()  # raises CycleError with the names of a circle


def test_no_module_imports_a_floor_above_its_own(graph: dict[str, set[str]]) -> None:
    def floor(module: str) -> int:
        return FLOOR[module.split(".")[1] if "." in module else ""]

    arrows = [(one, other) for one, others in graph.items() for other in others]
    up = [f"{one} -> {other}" for one, other in arrows if floor(other) > floor(one)]
    assert not up, "\n".join(up)


# One import of a module a line, one for each way of writing it and for each table above; "in a function:"
# stands for one that runs when the function is called. That others are allowed is what the whole repository
# shows.
FORBIDDEN = """
composer_plugins.kernels.ppo: import torch, os.path
composer_plugins.kernels.ppo: in a function: import trl
composer_plugins.kernels.linear.jsd: from ...errors import ComposerError
composer_plugins.cli: in a function: from composer_plugins.adapters import trl_mixin
composer_plugins.cli.check: from composer_plugins.testing import laws
composer_plugins.adapters.trl_mixin.trainer: from ..verl_plugin import estimator
composer_plugins.adapters.trl_mixin.trainer: from parity_tests import assertions
composer_plugins.adapters.new_framework: import new_framework
composer_plugins.conformance.trl_claims.policy: from composer_plugins.conformance.verl_claims import upstream
composer_plugins.recipes.codebook.demo: from kernels import policy
"""


@pytest.mark.parametrize("line", FORBIDDEN.strip().splitlines())
def test_a_forbidden_import_is_found(line: str) -> None:
    module, _, source = line.partition(": ")
    assert len([*violations(module, source.replace("in a function: ", "def f(): "))]) == 1


def loaded(program: str) -> set[str]:
    """The modules that are loaded once a program has run in an interpreter of its own."""
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {program}"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "program",
    [
        "import composer_plugins.config, composer_plugins.testing",
        "from composer_plugins.cli import main; sys.argv = ['composer-plugins', '--help']; main()",
    ],
)
def test_importing_the_package_loads_no_torch_and_no_framework(program: str) -> None:
    """The verl plugin is imported in every Ray process, and `composer-plugins --help` is typed often."""
    found = loaded(program)
    assert "composer_plugins" in found
    assert not found & {"torch", "numpy", "hypothesis"}.union(*FRAMEWORKS.values())


@pytest.mark.usefixtures("annotation_checks")
def test_kernels_check_shapes_under_pytest_and_only_there() -> None:
    """A wrong shape that broadcasts is an error here; users do not pay for the check."""
    with pytest.raises(jaxtyping.TypeCheckError):
        masking.masked_sum(torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bool))
    found = loaded("import composer_plugins.kernels.masking")
    assert "composer_plugins.kernels.masking" in found and "beartype" not in found
