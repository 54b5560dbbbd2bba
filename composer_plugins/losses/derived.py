"""Check that a catalogue row fits its kernel's signature, and derive a row from a signature.

A plugin's rows are checked when they are registered, which imports their kernels. The tests check the
bundled rows with the same function.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from composer_plugins.errors import ConfigError, did_you_mean, in_a_line, near, unknown
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
    Unlikely,
    check_kind,
)

STRINGS = {
    Loss: ("path", "summary", "paper", "proof", "tex", "mode", "advantage", "gradient"),
    Dialect: ("source", "proof", "note", "mode"),
}
EXAMPLES = {"float": 1.5, "int": 2, "bool": True}  # by the name of a type, in an annotation
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
MEND = "correct the row, a composer_plugins.losses.row.Loss"


def check_row(loss: object, *, kernel: bool = True) -> None:
    """Raise ConfigError for a row that nobody could run: its data, its kernel, its kernel's signature.

    Without `kernel` only the data is checked, and nothing is imported.
    """
    if not isinstance(loss, Loss):
        raise ConfigError("register", f"it got {loss!r}", "pass a composer_plugins.losses.row.Loss")
    check_kind(loss.kind, f"loss {loss.name!r}")
    where, name = f"{loss.kind} {loss.name!r}", loss.name
    if not isinstance(name, str) or not name or {"@", ":"} & {*name} or name != name.strip():
        problem = "the name is empty, has a blank at an end, or has '@' or ':' in it"
        raise ConfigError(where, problem, "rename the loss")
    try:
        _check_data(loss)
        if not kernel:
            return
        signature = inspect.signature(_kernel(loss.path)).parameters
        _check_signature(loss, signature)
        loss.check({name: d for name, d in loss.defaults.items() if d is not REQUIRED}, "its defaults")
        for dialect in loss.dialects:
            _check_dialect(loss, dialect)
    except ConfigError as error:
        raise error.under(where, ", ") from None


def row_of_import_path(path: str, kind: Kind, option: str, losses: Iterable[Loss]) -> Loss:
    """The row of a function that a user names by import path, derived from its signature.

    Positional parameters are inputs. Keyword-only ones are optional inputs if they have the name of one, and
    parameters otherwise. The function may declare as attributes what a row declares: `mode`, its
    aggregation mode, `average`, whether a preference loss takes length-averaged scores, `gradient`,
    `over_batch` and `exceptions`.
    Raises ConfigError at `option` for a path that cannot be imported, and for what is not such a signature.
    """
    return _derived(function_of_import_path(path, option), path, kind, option, losses)


def function_of_import_path(path: str, option: str) -> Callable[..., Any]:
    """The function at an import path that `option` holds; ConfigError at `option` if there is none."""
    try:
        return _kernel(path)
    except ConfigError as error:
        raise ConfigError(option, error.problem, error.remedy) from None


def row_of_function(
    function: Callable[..., Any], kind: Kind | None, option: str, losses: Iterable[Loss]
) -> Loss:
    """The row of a function itself, derived as `row_of_import_path` derives it."""
    losses = tuple(losses)
    if not callable(function):
        raise ConfigError(option, f"it is {function!r}", "pass a function, a name or an import path")
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__name__', 'function')}"
    kind = kind or kind_of_input(_first(function), losses, "policy")
    derived = _derived(function, name, kind, option, losses)
    return replace(derived, function=function)


def _derived(
    function: Callable[..., Any], path: str, kind: Kind, option: str, losses: Iterable[Loss]
) -> Loss:
    try:
        signature = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some functions that are written in C
        raise ConfigError(option, f"{path!r} has no signature", "name a function written in Python") from None
    takes = {name: p for name, p in signature.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    inputs = sorted({name for one in losses if one.kind == kind for name in (*one.needs, *one.optional)})
    needs = tuple(name for name, p in takes.items() if p.kind is not p.KEYWORD_ONLY)
    if needs and kind != (other := kind_of_input(needs[0], losses, kind)):
        problem = f"{path!r} takes {needs[0]!r} first, as {KINDS[other].singular} does, and is named as"
        problem += f" {KINDS[kind].singular}"
        remedy = f"name it in {KINDS[other].option}" if KINDS[other].option else "name another function"
        raise ConfigError(option, problem, remedy)
    for name in needs:
        if name not in INPUTS:
            problem = f"{path!r} takes {name!r} by position, which is not an input of {KINDS[kind].singular}"
            remedy = f"take inputs among {', '.join(inputs)}"
            if nearest := near(name, inputs):
                remedy = did_you_mean(nearest)
            elif takes[name].default is not inspect.Parameter.empty:
                remedy = f"write * before {name!r} to make it a parameter"
            raise ConfigError(option, problem, remedy)
    optional = tuple(name for name in takes if name in INPUTS and name not in needs)
    for name in optional:
        if takes[name].default is not None:
            problem = f"{path!r} takes the input {name!r} by keyword, and its default is not None"
            raise ConfigError(option, problem, "take it by position, or give it the default None")
    if not needs:
        problem, remedy = f"{path!r} takes no input by position", f"take inputs among {', '.join(inputs)}"
        raise ConfigError(option, problem, remedy)
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
    _check_exceptions(found["exceptions"], option)
    return found


def _check_exceptions(exceptions: object, option: str) -> None:
    """Raise ConfigError unless these are names of laws with reasons."""
    sound = isinstance(exceptions, Mapping) and all(
        isinstance(text, str) and text for pair in exceptions.items() for text in pair
    )
    if not sound:
        raise ConfigError(option, f"its exceptions are {exceptions!r}", "set a mapping of laws to reasons")


def kind_of_import_path(
    path: str, option: str, losses: Iterable[Loss], wanted: Kind | None = None, kind_option: str = ""
) -> Kind:
    """The kind of loss that the function at an import path is, by its first parameter.

    Raises ConfigError at `option` for a path that cannot be imported, and at `kind_option` for a function
    of another kind than `wanted`.
    """
    first = _first(function_of_import_path(path, option))
    kind = kind_of_input(first, losses, wanted or "policy")
    if wanted not in (None, kind):
        problem = f"it is {wanted!r}, and {path!r} takes {first!r} first, as {KINDS[kind].singular} does"
        raise ConfigError(kind_option, problem, f"set {kind}, or leave it out")
    return kind


def _first(function: Callable[..., Any]) -> str:
    """The name of a function's first parameter, or "" if it has none, or no signature."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def kind_of_input(first: str, losses: Iterable[Loss], kind: Kind) -> Kind:
    """The kind of the losses whose first input this is; `kind` if some of that kind, or none, have it."""
    kinds = [loss.kind for loss in losses if loss.needs[:1] == (first,)]
    return kind if kind in kinds or not kinds else kinds[0]


def _check_data(loss: Loss) -> None:
    _check_strings(loss)
    _check_tuple("needs", loss.needs, str)
    _check_tuple("optional", loss.optional, str)
    _check_tuple("detached", loss.detached, str)
    _check_tuple("dialects", loss.dialects, Dialect)
    for name in (*loss.needs, *loss.optional):
        if name not in INPUTS:
            raise _unknown_input(name)
    if not isinstance(loss.parameters, Mapping):
        raise ConfigError(
            "parameters", f"it is {loss.parameters!r}", "set a mapping of names to Parameter(...)"
        )
    _check_exceptions(loss.exceptions, "exceptions")
    for name, parameter in loss.parameters.items():
        if not isinstance(parameter, Parameter):
            raise ConfigError(f"parameter {name!r}", f"it is {parameter!r}", "set a Parameter(help, ...)")
        _check_tuple(f"only_with of parameter {name!r}", parameter.only_with[:1], str)
        _check_tuple(f"unlikely of parameter {name!r}", parameter.unlikely, Unlikely)
    listed = [*loss.needs, *loss.optional, *loss.parameters]
    if twice := [name for name in dict.fromkeys(listed) if listed.count(name) > 1]:
        raise ConfigError(twice[0], "the row names it twice in needs, optional and parameters", MEND)
    if loss.kind == "policy" and not loss.mode:
        raise ConfigError(
            "mode", "a policy loss has one, the denominator of its paper", f"set one of {', '.join(MODES)}"
        )
    for mode in (loss.mode, *(dialect.mode for dialect in loss.dialects)):
        if mode and mode not in MODES:
            raise unknown("mode", mode, MODES)


def _check_dialect(loss: Loss, dialect: Dialect) -> None:
    upstream = dialect.upstream
    if not isinstance(upstream, str) or not upstream or upstream != upstream.strip():
        raise ConfigError("dialect", f"its upstream is {upstream!r}", "set the upstream's name")
    where = f"dialect '{loss.name}@{upstream}'"
    if [other.upstream for other in loss.dialects].count(upstream) > 1:
        raise ConfigError(where, "the row has it twice", "write a version into one of them (verl<0.9)")
    try:
        _check_strings(dialect)
        loss.check(dialect.params)
    except ConfigError as error:
        raise error.under(where, ", ") from None
    for name, fact in dialect.denominators.items():
        if name not in loss.parameters or fact not in ("rows", "width"):
            raise ConfigError(
                f"{where}, denominators", f"it has {name!r}: {fact!r}", "set a parameter: 'rows' or 'width'"
            )
    for name in dialect.optional:
        if name not in loss.optional:
            raise ConfigError(f"{where}, optional", f"{name!r} is not among the row's optional inputs", MEND)


def _kernel(path: str) -> Callable[..., Any]:
    """The function that `path` names; each mistake in the path has an error of its own."""
    module, _, function = path.partition(":")
    if not module or not function.isidentifier():
        raise ConfigError("path", f"{path!r} is not an import path", "write module:function")
    try:
        found = import_module(module)
        kernel: Any = getattr(found, function, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the module's own code: SystemExit, the Skipped of pytest.skip()
        problem = f"{path!r} cannot be imported: {in_a_line(error)}"
        raise ConfigError("path", problem, f"make `import {module}` work where this runs") from None
    if not callable(kernel):
        functions = [name for name, member in vars(found).items() if inspect.isfunction(member)]
        nearest = near(function, functions)
        problem = f"{path!r} does not exist: {module} has no function {function!r}"
        raise ConfigError("path", problem, did_you_mean(nearest) if nearest else "correct the path")
    return kernel  # type: ignore[no-any-return]


def _check_signature(loss: Loss, signature: Mapping[str, inspect.Parameter]) -> None:
    takes = {name: p for name, p in signature.items() if p.kind not in VARIADIC}
    for name, parameter in takes.items():
        if name in loss.needs or name in loss.optional or name in loss.parameters:
            continue
        if name not in INPUTS and parameter.default is parameter.empty:
            raise _unknown_input(name)
        problem = (
            f"the kernel {loss.path} takes it, and the row names it in none of needs, optional, parameters"
        )
        raise ConfigError(name, problem, MEND)
    for name in (*loss.needs, *loss.optional, *loss.parameters):
        if name not in takes:
            raise ConfigError(name, f"the row names it, and {loss.path} does not take it", MEND)
    positional = [name for name, p in takes.items() if p.kind is not p.KEYWORD_ONLY]
    if positional[: len(loss.needs)] != [*loss.needs]:
        problem = (
            f"they are {', '.join(loss.needs)}, and {loss.path} takes by position {', '.join(positional)}"
        )
        raise ConfigError("needs", problem, "name the first positional parameters, in their order")
    for name in loss.optional:
        if takes[name].default is not None:
            problem = f"its default in {loss.path} is not None, as an optional input's is"
            raise ConfigError(name, problem, "give it the default None, or name it in needs")


def _check_strings(row: Loss | Dialect) -> None:
    for name in STRINGS[type(row)]:
        if not isinstance(value := getattr(row, name), str):
            raise ConfigError(name, f"it is {value!r}", "set a string")


def _check_tuple(name: str, value: object, of: type) -> None:
    """Raise ConfigError unless `value` is a tuple of these; ("logprobs") without its comma is a string."""
    noun = "string" if of is str else of.__name__
    if isinstance(value, of):
        shown = repr(value) if of is str else f"{noun}(...)"
        raise ConfigError(name, f"it is a {noun}", f"set a tuple: ({shown},)")
    if not isinstance(value, tuple | list):
        raise ConfigError(name, f"it is {value!r}", f"set a tuple, each of it a {noun}")
    for one in value:
        if not isinstance(one, of):
            raise ConfigError(name, f"it holds {one!r}", f"write a {noun}")


def _unknown_input(name: str) -> ConfigError:
    nearest = near(name, INPUTS)
    hint = did_you_mean(nearest) + " " if nearest else ""
    return ConfigError(
        name,
        "it is not an input that any framework provides",
        f"{hint}composer_plugins/losses/inputs.py lists all",
    )
