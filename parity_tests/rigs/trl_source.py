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
    todo = [f"self.{name}" for name in ROOTS]
    for node in ast.walk(methods["__init__"]):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == HEAD:
            todo += [read for keyword in node.keywords for read in _reads(keyword.value)]
    found, done = set(), {f"self.{GENERATION}"}
    while todo:
        read = todo.pop()
        if read in done:
            continue
        done.add(read)
        owner, _, name = read.rpartition(".")
        if owner == "args" and name in FIELDS:
            found.add(name)
        if owner == "self" and name in methods:
            todo += [one for one in _reads(methods[name]) if "." in one]  # and not its local variables
        todo += sources.get(read, ())
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
