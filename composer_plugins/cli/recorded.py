"""What the pages need of our kernels, recorded, so that it is read without torch.

`recorded.json` has the defaults and the numbers of each of our kernels. They are used only
where the code that made them is the code that is here, byte for byte. Everything else is computed.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import composer_plugins
from composer_plugins.losses.row import REQUIRED, Dialect, Loss

RECORDED = Path(__file__).with_name("recorded.json")
Numbers = Any  # a number, or lists of numbers, as JSON has them; "inf" and "nan" are strings
Results = dict[str, dict[str, Numbers]]  # by column ("default", "@trl"), then by "loss", "gradient"


class Example(NamedTuple):
    """What a loss is given in the example, and what it returns."""

    parameters: dict[str, Any]  # values of those without a default
    inputs: dict[str, Numbers]
    results: Results


@cache
def code() -> str:
    """A digest of the code from which the numbers follow."""
    folder, found = Path(composer_plugins.__file__).parent, hashlib.sha256()
    for file in (Path(__file__).with_name("worked_example.py"), *sorted((folder / "kernels").rglob("*.py"))):
        found.update(file.read_bytes())
    return found.hexdigest()


@cache
def _records() -> dict[str, Any]:
    records: dict[str, Any] = json.loads(RECORDED.read_text())
    return records if records["code"] == code() else {}


def record_of(loss: Loss) -> dict[str, Any] | None:
    """What is recorded of a row; None for one that is not ours, or that is not as it was recorded."""
    found = _records().get(f"{loss.kind} {loss.name}")
    is_current = found is not None and found["row"] == digest(loss)
    return found if is_current and loss.function is None else None


def digest(loss: Loss) -> str:
    """A digest of what the numbers need of a row."""
    examples = {name: one.example for name, one in loss.parameters.items()}
    dialects = [(d.upstream, {**d.params}, {**d.denominators}, d.optional) for d in loss.dialects]
    facts = (loss.path, loss.needs, loss.optional, examples, dialects)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def use_recorded_defaults(losses: Iterable[Loss]) -> None:
    """Put the recorded defaults where `Loss.defaults`, a cached property, keeps the signature's defaults."""
    for loss in losses:
        if record := record_of(loss):
            defaults = {name: record["defaults"].get(name, REQUIRED) for name in loss.parameters}
            vars(loss).setdefault("defaults", defaults)


def docstring(loss: Loss) -> str:
    """The docstring of a kernel. Our kernels are read in their source files: an import loads torch."""
    module, _, name = loss.path.removeprefix("composer_plugins.").partition(":")
    path = Path(composer_plugins.__file__).parent.joinpath(*module.split("."))
    if loss.function is None and loss.path.startswith("composer_plugins."):
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            for node in ast.parse(file.read_bytes()).body:
                match node:
                    case ast.FunctionDef(name=found) if found == name:
                        return ast.get_docstring(node) or ""
                    case ast.Assign([ast.Name(found)], ast.Call(args=[_, _, ast.Constant(str(text)), *_])):
                        if found == name:  # name = preset(kernel, "name", "its docstring", ...)
                            return inspect.cleandoc(text)
    return inspect.getdoc(loss.kernel()) or ""


def column(dialect: Dialect | None) -> str:
    """The name of a column of results."""
    return f"@{dialect.upstream}" if dialect else "default"


def examples(loss: Loss) -> dict[str, Any]:
    """A value for each parameter that has no default."""
    required = {n: loss.parameters[n].example for n, default in loss.defaults.items() if default is REQUIRED}
    for name, value in required.items():
        if value is None:
            raise ValueError(f"{name} has no default: write {name}=1, or Parameter(..., example=1) in a row")
    return required
