"""The options of GRPOConfig that TRL's source reads for the loss."""

import ast
import inspect
import textwrap
from dataclasses import fields

from trl import GRPOConfig, GRPOTrainer

FIELDS = {field.name for field in fields(GRPOConfig)}
# The loss of one micro-batch, and what is made of the completions before it.
ROOTS = ("_compute_loss", "_generate_and_score_completions")
GENERATION = "_generate"  # what it reads concerns the sampling of completions
HEAD = "add_fused_lm_head"  # called in the constructor: it computes the log-probabilities of every forward


def options_read() -> set[str]:
    """The fields that the methods in ROOTS read, and the methods they call, directly or by an attribute."""
    body = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer))).body[0]
    assert isinstance(body, ast.ClassDef)
    methods = {node.name: node for node in body.body if isinstance(node, ast.FunctionDef)}
    sources = _sources_of_attributes(methods["__init__"])
    found = set()
    for node in ast.walk(methods["__init__"]):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == HEAD:
            for keyword in node.keywords:
                found |= _fields(_reads(keyword.value), sources)
    todo, done = list(ROOTS), {GENERATION}
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        reads = _reads(methods[name])
        todo += [read.removeprefix("self.") for read in reads if read.removeprefix("self.") in methods]
        found |= _fields({read for read in reads if read.startswith(("self.", "args."))}, sources)
    return found


def _reads(node: ast.AST) -> set[str]:
    """The names that an expression reads: "args.beta", "self.beta", and "coef" of a local variable."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            owner = getattr(one.value, "attr", getattr(one.value, "id", ""))
            if owner in ("self", "args"):
                found.add(f"{owner}.{one.attr}")
        elif isinstance(one, ast.Name):
            found.add(one.id)
    return found


def _sources_of_attributes(init: ast.FunctionDef) -> dict[str, set[str]]:
    """What the constructor makes each attribute and each local number of.

    Local objects that are made by a call (the model, the tokenizer) are left out.
    """
    found: dict[str, set[str]] = {}
    for node in ast.walk(init):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Attribute):
                found.setdefault(target.id, set()).update(_reads(node.value))
            elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                found.setdefault(f"self.{target.attr}", set()).update(_reads(node.value))
    return found


def _fields(reads: set[str], sources: dict[str, set[str]]) -> set[str]:
    """The fields of GRPOConfig that these names come from."""
    todo, done, found = list(reads), set(), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        owner, _, attribute = name.rpartition(".")
        if owner == "args" and attribute in FIELDS:
            found.add(attribute)
        todo += sources.get(name, ())
    return found
