"""Check that a catalogue row fits its kernel's signature, and derive a row from a signature.

A plugin's rows are checked when they are registered, which imports their kernels. The tests check the
bundled rows with the same function.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from composer_plugins.errors import ConfigError, did_you_mean, in_a_line, near, unknown, with_place
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.row import (
    GRADIENTS,
    KINDS,
    MODES,
    REQUIRED,
    Dialect,
    Kind,
    Loss,
    Parameter,
    check_kind,
)

# What `list` and `explain` print of every row: a value that is not a string would stop these commands.
STRINGS = {
    Loss: ("path", "summary", "paper", "proof", "tex", "mode", "advantage", "gradient"),
    Dialect: ("upstream", "source", "proof", "note", "mode"),
}
EXAMPLES = {"float": 1.5, "int": 2, "bool": True}  # by the name of a type, in an annotation
MEND = "correct the row, a composer_plugins.losses.row.Loss"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_row(loss: Loss, *, kernel: bool = True) -> None:
    """Raise ConfigError for a row that would take the commands down, or train something else.

    Without `kernel` only the data is checked, and nothing is imported. What else is wrong with a row, Python
    says where it is registered or first used.
    """
    check_kind(loss.kind, f"loss {loss.name!r}")
    where, name = f"{loss.kind} {loss.name!r}", loss.name
    if not isinstance(name, str) or not name or {"@", ":"} & {*name} or name != name.strip():
        problem = "the name is empty, has a blank at an end, or has '@' or ':' in it"
        raise ConfigError(where, problem, "rename the loss")
    try:
        _check_data(loss)
        if not kernel:
            return
        signature = inspect.signature(function_of_import_path(loss.path, "path")).parameters
        _check_signature(loss, signature)
        loss.check({name: d for name, d in loss.defaults.items() if d is not REQUIRED}, "its defaults")
        for dialect in loss.dialects:
            _check_dialect(loss, dialect)
    except ConfigError as error:
        raise error.under(where, ", ") from None


def function_of_import_path(path: str, option: str) -> Callable[..., Any]:
    """The function at an import path that `option` holds; ConfigError at `option` without one."""
    module, _, function = path.partition(":")
    try:
        found = import_module(module)
        kernel: Any = getattr(found, function, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the module's own code: SystemExit, the Skipped of pytest.skip()
        problem = f"{path!r} cannot be imported: {in_a_line(error)}"
        remedy = f"make `import {module}` work where this runs"
        if module.endswith(".py"):
            remedy = f"write {Path(module).stem}:{function}, where Python finds {Path(module).name}"
        raise ConfigError(option, problem, remedy) from None
    if not callable(kernel):
        functions = [name for name, member in vars(found).items() if inspect.isfunction(member)]
        nearest = near(function, functions)
        problem = f"{path!r} does not exist: {module} has no function {function!r}"
        remedy = did_you_mean(nearest) if nearest else "correct the path: module:function"
        raise ConfigError(option, problem, remedy)
    return kernel  # type: ignore[no-any-return]


def function_named(path: str, option: str) -> Callable[..., Any]:
    """The function of an import path, or of FILE.py:function; ConfigError at `option` without one."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return function_of_import_path(path, option)
    place = Path(file).resolve()
    if not place.is_file():
        raise ConfigError(option, f"the file {file} does not exist", "correct its path")
    sys.path.insert(0, str(place.parent))  # for the modules next to it
    spec = spec_from_file_location(place.stem, place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    try:
        sys.modules.setdefault(place.stem, module)  # a dataclass looks its module up
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(option, f"{file} fails: {with_place(error)}", "correct the file") from error
    if not callable(function := getattr(module, name, None)):
        functions = [one for one, x in vars(module).items() if callable(x) and not one.startswith("_")]
        raise unknown(option, name, functions, noun=f"function of {file}")
    return function  # type: ignore[no-any-return]


def row_of_function(
    function: Callable[..., Any], kind: Kind | None, option: str, losses: Iterable[Loss], name: str = ""
) -> Loss:
    """The row of a function itself, derived as `row_of_signature` derives it, under its path or a name.

    Without a kind, it is that of the losses with the same first input: policy, if there are several or none.
    """
    losses = tuple(losses)
    name = name or f"{getattr(function, '__module__', '')}:{getattr(function, '__name__', 'function')}"
    if kind is None:
        first = first_parameter(function)
        kinds = [loss.kind for loss in losses if loss.needs[:1] == (first,)]
        kind = "policy" if "policy" in kinds or not kinds else kinds[0]
    return replace(row_of_signature(function, name, kind, option, losses), function=function)


def row_of_signature(
    function: Callable[..., Any], path: str, kind: Kind, option: str, losses: Iterable[Loss]
) -> Loss:
    """The row of a function that a user names by this path, derived from its signature.

    Positional parameters are inputs. Keyword-only ones are optional inputs if they have the name of one, and
    parameters otherwise. The function may declare as attributes what a row declares: `mode`, its
    aggregation mode, `average`, whether a preference loss takes length-averaged scores, `gradient`,
    `over_batch` and `exceptions`.
    Raises ConfigError at `option` for what is not such a signature.
    """
    try:
        signature = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some functions that are written in C
        raise ConfigError(option, f"{path!r} has no signature", "name a function written in Python") from None
    takes = {name: p for name, p in signature.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    of_kind = {name for one in losses if one.kind == kind for name in (*one.needs, *one.optional)}
    inputs = sorted(of_kind | ({"entropies", "ref_logprobs"} & INPUTS.keys() if kind == "policy" else set()))
    needs = tuple(name for name, p in takes.items() if p.kind is not p.KEYWORD_ONLY)
    for name in needs:
        if name not in INPUTS:
            problem = f"{path!r} takes {name!r} by position, which is not an input of {KINDS[kind].singular}"
            remedy = f"take inputs among {', '.join(inputs)}"
            if nearest := near(name, inputs):
                remedy = did_you_mean(nearest)
            elif takes[name].default is not inspect.Parameter.empty:
                remedy = f"write * before {name!r} to make it a parameter"
            raise ConfigError(option, problem, remedy)
    if not needs:
        problem, remedy = f"{path!r} takes no input by position", f"take inputs among {', '.join(inputs)}"
        raise ConfigError(option, problem, remedy)
    optional = tuple(name for name in takes if name in INPUTS and name not in needs)
    keywords = [name for name in takes if name not in (*needs, *optional)]
    unranged = {
        name: Parameter(f"a parameter of {path}", unchecked=True, example=another_than_none(takes[name]))
        for name in keywords
    }
    return Loss(
        name=path,
        kind=kind,
        path=path,
        summary=(inspect.getdoc(function) or path).partition("\n")[0],
        paper="",
        proof="",
        needs=needs,
        optional=optional,
        parameters=unranged,
        **declared(function, path, option, mode="", average=False),
    )


def another_than_none(parameter: inspect.Parameter) -> float | None:
    """A value for a parameter whose default is None and whose annotation is a number; None for any other."""
    if parameter.default is not None:
        return None
    found = parameter.annotation
    annotation = found.__name__ if isinstance(found, type) else str(found)  # Optional[float] has a name too
    return next((value for name, value in EXAMPLES.items() if re.search(rf"\b{name}\b", annotation)), None)


def declared(
    function: Callable[..., Any], path: str, option: str, *, gradient: str = "derivative", **more: Any
) -> dict[str, Any]:
    """What a function declares of its row, or else these defaults; ConfigError for another value."""
    defaults = {"gradient": gradient, "over_batch": False, "exceptions": {}} | more
    found = {name: getattr(function, name, default) for name, default in defaults.items()}
    for name, known in (("gradient", GRADIENTS), ("mode", MODES)):
        if (value := found.get(name)) not in (*known, defaults.get(name)):
            raise unknown(option, str(value), known, noun=f"{name} of {path}")
    for name in ("over_batch", "average"):
        if not isinstance(value := found.get(name, False), bool):
            problem = f"the attribute {name} of {path!r} is {value!r}"
            raise ConfigError(option, problem, "set True or False")
    return found


def first_parameter(function: Callable[..., Any]) -> str:
    """The name of a function's first parameter, or "" if it has none, or no signature."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def _check_data(loss: Loss) -> None:
    _check_strings(loss)
    for name in (*loss.needs, *loss.optional):
        if name not in INPUTS:
            hint = f"{did_you_mean(nearest)} " if (nearest := near(name, INPUTS)) else ""
            problem = "it is not an input that any framework provides"
            raise ConfigError(name, problem, f"{hint}composer_plugins/losses/inputs.py lists all")
    if loss.kind == "policy" and not loss.mode:
        problem = "a policy loss has one, the denominator of its paper"
        raise ConfigError("mode", problem, f"set one of {', '.join(MODES)}")
    for mode in (loss.mode, *(dialect.mode for dialect in loss.dialects)):
        if mode and mode not in MODES:
            raise unknown("mode", mode, MODES)


def _check_dialect(loss: Loss, dialect: Dialect) -> None:
    where = f"dialect '{loss.name}@{dialect.upstream}'"
    if [other.upstream for other in loss.dialects].count(dialect.upstream) > 1:
        raise ConfigError(where, "the row has it twice", "write a version into one of them (verl<0.9)")
    try:
        _check_strings(dialect)
        loss.check(dialect.params)
    except ConfigError as error:
        raise error.under(where, ", ") from None


def _check_signature(loss: Loss, signature: Mapping[str, inspect.Parameter]) -> None:
    takes = {name: p for name, p in signature.items() if p.kind not in VARIADIC}
    for name in takes:
        if name not in (*loss.needs, *loss.optional, *loss.parameters):
            problem = f"the kernel {loss.path} takes it, and the row names it in none of needs, optional, "
            raise ConfigError(name, f"{problem}parameters", MEND)
    for name in (*loss.needs, *loss.optional, *loss.parameters):
        if name not in takes:  # **kwargs of the kernel would swallow it
            raise ConfigError(name, f"the row names it, and {loss.path} does not take it", MEND)
    positional = [name for name, p in takes.items() if p.kind is not p.KEYWORD_ONLY]
    if positional[: len(loss.needs)] != [*loss.needs]:
        problem = (
            f"they are {', '.join(loss.needs)}, and {loss.path} takes by position {', '.join(positional)}"
        )
        raise ConfigError("needs", problem, "name the first positional parameters, in their order")


def _check_strings(row: Loss | Dialect) -> None:
    for name in STRINGS[type(row)]:
        if not isinstance(value := getattr(row, name), str):
            raise ConfigError(name, f"it is {value!r}", "set a string")
