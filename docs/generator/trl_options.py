"""The options of GRPOConfig that TRL's source reads for the loss; the tables of docs/trl_options.md.

`python -m docs.generator.trl_options` writes the tables into that page, from the dataclass and the
catalogue.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.frameworks.registry import called
from composer_plugins.frameworks.trl import LOSS_OPTIONS, OF_MODES, TRL
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss, Parameter
from docs.generator.tables import ROOT, filled

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


def table(*rows: tuple[str, ...]) -> str:
    """A table of markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def options() -> str:
    """Each option that ComposerGRPOConfig adds, with the text of its --help."""
    own = [one for one in fields(ComposerGRPOConfig) if one.name not in FIELDS or one.name == "loss_type"]
    body = [(f"`{one.name}`", _code(repr(one.default)), _text(one.metadata["help"])) for one in own]
    return table(("option", "default", "meaning"), *body)


def trl_options() -> str:
    """What each of TRL's options does beside a policy of ours."""
    body = []
    for name, option in LOSS_OPTIONS.items():
        for row in option.sets:
            value = row.conversion.formula(name)
            effect = f"sets {' and '.join(f'`{one}`' for one in row.parameters)} to `{value}`"
            body.append((f"`{name}`", ", ".join(f"`{loss}`" for loss in row.losses), effect))
    by_effect: dict[str, list[str]] = {}
    for name, option in LOSS_OPTIONS.items():
        if not option.sets:
            by_effect.setdefault(option.effect, []).append(f"`{name}`")
    body += [(", ".join(names), "all", effect) for effect, names in by_effect.items()]
    return table(("option of TRL", "losses", "effect"), *body)


def losses_of(kind: str) -> str:
    """Each loss of this kind that runs in TRL: its formula, denominator, defaults, and dialect @trl.

    A parameter whose default is None is in the table of parameters only.
    """
    heads = {"policy": ("denominator",), "preference": ("log-probabilities",), "divergence": ()}
    body = []
    for loss in losses():
        if loss.kind == kind and TRL.runs(loss):
            more = {"policy": (_denominator(loss.mode),), "preference": (_scores(loss.average),)}.get(
                kind, ()
            )
            defaults = _values({n: v for n, v in loss.defaults.items() if v is not None})
            body.append((f"`{loss.name}`", _formula(loss), *more, defaults, _dialect(loss)))
    return table(("name", "formula", *heads[kind], "defaults", "`@trl`"), *body)


def parameters_of(kind: str) -> str:
    """Each parameter of the losses of this kind that run in TRL: its values, meaning, losses, other names.

    A parameter that means the same in several losses has one row.
    """
    rows: dict[tuple[str, Parameter, tuple[str, ...]], list[str]] = {}
    for loss in losses():
        if loss.kind == kind and TRL.runs(loss):
            names = called(loss)
            for name, parameter in loss.parameters.items():
                key = (name, replace(parameter, example=None, unlikely=()), tuple(names.get(name, ())))
                rows.setdefault(key, []).append(f"`{loss.name}`")
    body = [
        (
            f"`{name}`",
            ", ".join(_code(repr(choice)) for choice in parameter.choices) or parameter.interval,
            _text(parameter.help),
            ", ".join(names),
            ", ".join(map(_code, elsewhere)),
        )
        for (name, parameter, elsewhere), names in rows.items()
    ]
    return table(("parameter", "values", "meaning", "losses", "called elsewhere"), *body)


def _formula(loss: Loss) -> str:
    """The first indented block of the kernel's docstring, or its first line."""
    text = inspect.getdoc(loss.kernel()) or ""
    block = re.search(r"(?:^    .*\n?)+", text, re.MULTILINE)
    lines = block[0].splitlines() if block else text.splitlines()[:1]
    return "<br>".join(_code(" ".join(line.split())) if block else _text(line) for line in lines)


def _dialect(loss: Loss) -> str:
    """What the dialect @trl has otherwise than the name alone; empty without such a dialect."""
    if all(dialect.upstream != "trl" for dialect in loss.dialects):
        return ""
    theirs = Choice(loss, {}, upstream="trl")
    dialect = loss.dialect("trl")
    found = [_values({n: v for n, v in dialect.params.items() if v != loss.defaults[n]})]
    found += [f"denominator {_denominator(theirs.mode)}"] if theirs.mode != loss.mode else []
    found += [_scores(theirs.average)] if theirs.average != loss.average else []
    found += [f"takes {', '.join(f'`{name}`' for name in dialect.optional)}"] if dialect.optional else []
    return ", ".join(filter(None, found)) or "the same"


def _denominator(mode: str) -> str:
    return f"`{OF_MODES[mode]}`" if mode in OF_MODES else "a sum"


def _scores(average: bool) -> str:
    return "averaged" if average else "summed"


def _values(values: Mapping[str, Any]) -> str:
    return _code(", ".join(f"{name}={value}" for name, value in values.items()))


def _code(text: str) -> str:
    return "`{}`".format(text.replace("`", "").replace("|", "\\|")) if text else ""


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGE = ROOT / "docs" / "trl_options.md"
TABLES = {
    "options": options,
    "options of TRL": trl_options,
}
for _kind in ("policy", "divergence", "preference"):
    TABLES[f"{_kind} losses"] = partial(losses_of, _kind)
    TABLES[f"{_kind} parameters"] = partial(parameters_of, _kind)


def page() -> str:
    """The text of docs/trl_options.md with its tables made anew."""
    return filled(PAGE, TABLES)


if __name__ == "__main__":
    PAGE.write_text(page())
