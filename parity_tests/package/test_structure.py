"""One home for each thing: findings, the choice and the call of a kernel, the internals of a framework."""

import ast
from collections.abc import Iterator
from typing import TypeVar

from parity_tests.rigs.paths import ROOT

Node = TypeVar("Node", bound=ast.AST)

TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for folder in ("composer_plugins", "adapters", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
ADAPTERS = {"/".join(file.split("/")[:2]) for file in TREES if file.startswith("adapters/")}

CONSTRUCTED = ("ConfigError", "DataError", "ComposerError", "Finding")
MOST_ERRORS = 535  # places that make one: a bound that may only fall
KERNEL_USERS = {
    "composer_plugins/losses/row.py",  # the defaults
    "composer_plugins/losses/calling.py",
    "composer_plugins/cli/recorded.py",  # the docstring
    "composer_plugins/conformance/reductions.py",  # a row by name, for a comparison
    "composer_plugins/cli/worked_example.py",  # every dialect of a loss, none of them chosen
}


def nodes(kind: type[Node], folder: str = "") -> Iterator[tuple[str, Node]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree) if file.startswith(folder) else ():
            if isinstance(node, kind):
                yield file, node


def test_there_is_one_class_of_findings() -> None:
    classes = [(file, node.name) for file, node in nodes(ast.ClassDef) if node.name in ("Finding", "Fault")]
    assert classes == [("composer_plugins/errors.py", "Finding")]


def test_a_chosen_kernel_is_called_in_one_place() -> None:
    users = {file for file, node in nodes(ast.Attribute) if node.attr == "kernel"}
    assert {file for file in users if not file.startswith("composer_plugins/testing/")} == KERNEL_USERS


def test_a_loss_is_chosen_in_one_module() -> None:
    choosers = ("choose_policy", "choose_advantage")
    chosen = {file for file, node in nodes(ast.Attribute) if node.attr in choosers}
    assert chosen - {"composer_plugins/config.py"} == {"composer_plugins/objective/asking.py"}


def literal(node: ast.AST) -> str:
    """The text of a string or of an f-string, whose values stand as {}."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def test_every_error_and_finding_has_a_problem_and_a_remedy() -> None:
    """A "; " stands only between the two, and there is no full stop at the end."""
    calls = [(file, node) for file, node in nodes(ast.Call) if getattr(node.func, "id", "") in CONSTRUCTED]
    for file, call in calls:
        if not any(isinstance(one, ast.Starred) for one in call.args):  # a finding of another interpreter
            parts = [literal(part) for part in (*call.args, *(word.value for word in call.keywords))]
            *_, problem, remedy = parts
            where = f"{file}:{call.lineno}"
            assert all(parts) and "; " not in problem, where
            assert not problem.endswith(".") and not remedy.removesuffix("...").endswith("."), where
    assert 100 < len(calls) <= MOST_ERRORS


def private_names(folder: str) -> Iterator[tuple[str, int, str, bool]]:
    """File, line and private name of each attribute, getattr and import, and whether it is on super()."""
    for file, node in nodes(ast.expr, folder):
        name = node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = str(getattr(node.args[1], "value", ""))
        if name.startswith("_") and not name.startswith("__"):
            yield file, node.lineno, name, ast.unparse(node).startswith("super().")
    for file, imported in nodes(ast.ImportFrom, folder):
        for alias in imported.names:
            if alias.name.startswith("_") and not (imported.module or "").startswith("composer_plugins"):
                yield file, imported.lineno, alias.name, False


def own_names(folder: str) -> set[str]:
    """The functions, classes, variables and attributes of self that an adapter defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for kind in kinds for _, node in nodes(kind, folder)}
    names |= {node.id for _, node in nodes(ast.Name, folder) if isinstance(node.ctx, ast.Store)}
    attributes = [node for _, node in nodes(ast.Attribute, folder) if isinstance(node.ctx, ast.Store)]
    return names | {node.attr for node in attributes if ast.unparse(node.value) == "self"}


def test_private_names_of_a_framework_stand_only_in_upstream_py() -> None:
    """A private name is the framework's unless the adapter defines it. An override is named there too."""
    found = []
    for adapter in ADAPTERS:
        own, upstream = own_names(f"{adapter}/"), f"{adapter}/upstream.py"
        named = (ROOT / upstream).read_text() if upstream in TREES else ""  # it may need none
        for file, line, name, on_super in private_names(f"{adapter}/"):
            if file != upstream and (name not in named if on_super else name not in own):
                found.append(f"{file}:{line}: {'super().' * on_super}{name} is not in {upstream}")
    assert len(ADAPTERS) >= 8 and not found, "\n".join(found)
