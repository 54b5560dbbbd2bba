"""What a Python script gives the config of a framework, by its syntax. It is not executed.

A call of the config's class is read, with the literals and the names that stand for one. What the script
changes after that call is named, and so is a trainer that may compute another loss.
"""

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import Framework

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
# Methods that change the object: a dict or a list that has one called is no literal any more.
CHANGING = ("update", "setdefault", "pop", "clear", "append", "extend", "insert", "popitem")
# What has attributes with the names of options, and is no config of a trainer.
OTHERS = ("model", "tokenizer", "processor", "generation_config")
# Parts of the names of a trainer's methods that take part in its loss.
OF_THE_LOSS = ("loss", "advantage", "logps", "reward", "training_step", "generate_and_score")
GIVE = "give it after the script, as key=value, to have it examined too"


class Call(NamedTuple):
    """A call of the config's class."""

    line: int
    overrides: tuple[str, ...]
    findings: tuple[Finding, ...]


def unknown(key: str, why: str, remedy: str = GIVE) -> Finding:
    """The finding for an option whose value is not known."""
    return Finding("warning", key, f"its value is not known: {why}", remedy)


def calls(tree: ast.Module, framework: Framework) -> Iterator[Call]:
    """Yield each call that makes the framework's config. `changes` has what happens to it afterwards."""
    values = constants(tree)
    for node in ast.walk(tree):
        made = config_class(node, framework)
        if not isinstance(node, ast.Call) or not made:
            continue
        overrides, findings = list[str](), list[Finding]()
        if framework.class_option:
            overrides.append(f"{framework.class_option}={json.dumps(made.removesuffix('.Config'))}")
        for one in node.keywords:
            try:
                value = literal(one.value, values)
                found = {one.arg: value} if one.arg else dict(value)
                overrides += [f"{key}={json.dumps(value)}" for key, value in found.items()]
            except (TypeError, ValueError):
                why = f"{' '.join(ast.unparse(one.value).split())} is known at its run only"
                findings.append(unknown(one.arg or f"**{ast.unparse(one.value)}", why))
        yield Call(node.lineno, tuple(overrides), tuple(findings))


def config_class(node: ast.AST, framework: Framework) -> str:
    """The class of the framework's config that a call makes; "" for any other node."""
    name = f".{ast.unparse(node.func)}" if isinstance(node, ast.Call) else ""
    return next((one for one in framework.config_classes if name.endswith(f".{one}")), "")


def changes(tree: ast.Module, framework: Framework) -> Iterator[Finding]:
    """Yield what the script does beside that call which may change the loss.

    An option that is assigned to an attribute, or given to setattr or replace; a trainer with another loss.
    """
    bearing = {one.key for one in framework.options} | {*framework.not_carried, *ComposerConfig.model_fields}
    own_classes = {one.name for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    known = {*framework.trainers, *own_classes}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in sorted(bearing.intersection(assigned(node))):
            yield unknown(name, f"line {line} sets it after the config is made")
        if isinstance(node, ast.ClassDef) and any(named(one).endswith("Trainer") for one in node.bases):
            own = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            for method in (one for one in own if any(part in one for part in OF_THE_LOSS)):
                problem = f"its method {method} is the script's own, and is not read"
                yield Finding("warning", f"class {node.name}", problem, "compare it by hand")
        elif isinstance(node, ast.Call) and framework.trainers and is_other_trainer(called(node), known):
            problem = f"line {line} trains with it, and only {framework.trainers[0]}'s loss is read here"
            yield Finding("warning", called(node), problem, "compare its loss by hand")


def assigned(node: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes that a statement or a call sets."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                holder = ast.unparse(one.value) if isinstance(one, ast.Attribute) else "self"
                if (
                    isinstance(one, ast.Attribute)
                    and holder != "self"
                    and not any(x in holder for x in OTHERS)
                ):
                    yield one.attr
    elif isinstance(node, ast.Call) and called(node) == "setattr" and len(node.args) == 3:
        if isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value)
    elif isinstance(node, ast.Call) and called(node) == "replace":
        yield from (one.arg for one in node.keywords if one.arg)


def is_other_trainer(name: str, known: Set[str]) -> bool:
    """Whether a name is that of a trainer, and none of these."""
    return name.endswith("Trainer") and name not in known


def called(node: ast.Call) -> str:
    """The last part of the name that a call has."""
    return named(node.func)


def named(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of the names that a script sets once, by an assignment, and does not change."""
    stored = [
        one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    ]
    stored += [one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)]
    changed = {
        ast.unparse(one.value)
        for one in ast.walk(tree)
        if (isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load))
        or (isinstance(one, ast.Attribute) and one.attr in CHANGING)
    }
    return {
        one.targets[0].id: one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name)
        if stored.count(one.targets[0].id) == 1 and one.targets[0].id not in changed
    }


def literal(node: ast.expr, values: Mapping[str, ast.expr]) -> Any:
    """The value of an expression: a literal, a name that stands for one, or a dict( ) of those."""
    if isinstance(node, ast.Name) and node.id in values:
        rest = {name: value for name, value in values.items() if name != node.id}
        return literal(values[node.id], rest)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        found = dict[str, Any]()
        for one in node.keywords:
            value = literal(one.value, values)
            found |= {one.arg: value} if one.arg else dict(value)
        return found
    if isinstance(node, ast.Dict):
        found = {}
        for key, value in zip(node.keys, node.values, strict=True):
            one = literal(value, values)
            found |= dict(one) if key is None else {ast.literal_eval(key): one}
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](literal(node.left, values), literal(node.right, values))
    return ast.literal_eval(node)
