"""Whether a catalogue row is sound: its own data, and the signature of its kernel held against it.

A plugin's rows are held to this when they are registered, which imports their kernels; the bundled rows
by the tests, with the same function.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, get_args

from composer_plugins.bundled import reduction
from composer_plugins.catalogue import REQUIRED, Dialect, Kind, Loss, Parameter
from composer_plugins.errors import ConfigError, did_you_mean, in_a_line, near, unknown
from composer_plugins.inputs import INPUTS

MODES = [loss.name for loss in reduction.LOSSES if loss.kind == "aggregation"]
STRINGS = {Loss: ("path", "summary", "paper", "proof", "mode"), Dialect: ("source", "proof", "note")}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_row(loss: object) -> None:
    """Raise ConfigError for a row that nobody could run: its data, its kernel, its kernel's signature."""
    if not isinstance(loss, Loss):
        raise ConfigError(f"register() got {loss!r}; wanted a composer_plugins.catalogue.Loss")
    if loss.kind not in get_args(Kind):
        raise ConfigError(f"loss {loss.name!r} has kind {loss.kind!r}; known: {', '.join(get_args(Kind))}")
    try:
        _check_name(loss.name)
        _check_data(loss)
        for dialect in loss.dialects:
            _check_dialect(loss, dialect)
        _check_signature(loss, inspect.signature(_kernel(loss.path)).parameters)
    except ConfigError as error:
        raise ConfigError(f"{loss.kind} {loss.name!r}: {error}") from None


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or "@" in name or name != name.strip():
        raise ConfigError("a name is not empty and has no '@' (that is a dialect)")


def _check_data(loss: Loss) -> None:
    _check_strings(loss)
    _check_tuple("needs", loss.needs, str)
    _check_tuple("optional", loss.optional, str)
    _check_tuple("dialects", loss.dialects, Dialect)
    for name in (*loss.needs, *loss.optional):
        if name not in INPUTS:
            raise ConfigError(f"it needs {_unknown_input(name)}")
    if not isinstance(loss.parameters, Mapping):
        raise ConfigError(f"parameters is {loss.parameters!r}; wanted a mapping of names to Parameter(...)")
    for name, parameter in loss.parameters.items():
        if not isinstance(parameter, Parameter):
            raise ConfigError(f"parameter {name!r} is {parameter!r}; wanted a Parameter({parameter!r}, help)")
    listed = [*loss.needs, *loss.optional, *loss.parameters]
    if twice := [name for name in dict.fromkeys(listed) if listed.count(name) > 1]:
        raise ConfigError(f"its row names {twice[0]!r} twice in needs, optional, parameters")
    _in("its defaults", lambda: loss.check(_defaults(loss)))
    if loss.kind == "policy" and not loss.mode:
        raise ConfigError(f"a policy loss has a mode, its paper's denominator: one of {', '.join(MODES)}")
    if loss.mode and loss.mode not in MODES:
        raise unknown("mode", loss.mode, MODES)


def _check_dialect(loss: Loss, dialect: Dialect) -> None:
    upstream = dialect.upstream
    if not isinstance(upstream, str) or not upstream or upstream != upstream.strip():
        raise ConfigError(f"the upstream of a dialect is {upstream!r}; wanted a name")
    where = f"its dialect '{loss.name}@{upstream}'"
    if [other.upstream for other in loss.dialects].count(upstream) > 1:
        raise ConfigError(f"{where} is there twice: an upstream has one; write a version into it (verl<0.9)")
    _in(where, lambda: _check_strings(dialect))
    _in(where, lambda: loss.check(dialect.params))
    for name, fact in dialect.counts.items():
        if name not in loss.parameters or fact not in ("rows", "width"):
            raise ConfigError(
                f"{where}: counts has {name!r}: {fact!r}; wanted a parameter: 'rows' or 'width'"
            )
    for name in dialect.takes:
        if name not in loss.optional:
            raise ConfigError(f"{where} takes {name!r}, which is not among the row's optional inputs")


def _kernel(path: str) -> Callable[..., Any]:
    """The function that `path` names; Loss.kernel would tell no mistake from another."""
    module, _, function = path.partition(":")
    if not module or not function.isidentifier():
        raise ConfigError(f"path is {path!r}; wanted module:function")
    try:
        found = import_module(module)
    except Exception as error:  # the plugin's own module
        raise ConfigError(f"its kernel {path!r} fails on import: {in_a_line(error)}") from None
    kernel: Any = getattr(found, function, None)
    if not callable(kernel):
        functions = [name for name, member in vars(found).items() if inspect.isfunction(member)]
        nearest = near(function, functions)
        hint = did_you_mean(nearest) if nearest else ""
        raise ConfigError(f"its kernel {path!r} is not there: {module} has no function {function!r}{hint}")
    return kernel  # type: ignore[no-any-return]


def _check_signature(loss: Loss, signature: Mapping[str, inspect.Parameter]) -> None:
    takes = {name: p for name, p in signature.items() if p.kind not in VARIADIC}
    for name, parameter in takes.items():
        if name in loss.needs or name in loss.optional or name in loss.parameters:
            continue
        if name not in INPUTS and parameter.default is parameter.empty:
            raise ConfigError(f"its kernel {loss.path} takes {_unknown_input(name)}")
        raise ConfigError(
            f"its kernel {loss.path} takes {name!r}, "
            "which its row lists in none of needs, optional, parameters"
        )
    for name in (*loss.needs, *loss.optional, *loss.parameters):
        if name not in takes:
            raise ConfigError(f"its row names {name!r}, which {loss.path} does not take")
    positional = [name for name, p in takes.items() if p.kind is not p.KEYWORD_ONLY]
    if positional[: len(loss.needs)] != [*loss.needs]:
        raise ConfigError(
            f"its needs are {', '.join(loss.needs)}, and its kernel {loss.path} takes by position "
            f"{', '.join(positional) or 'nothing'}: needs are the first of these, in their order"
        )
    for name in loss.optional:
        _check_default(name, None, takes[name])
    for name, row in loss.parameters.items():
        _check_default(name, row.default, takes[name])


def _check_default(name: str, in_row: object, parameter: inspect.Parameter) -> None:
    in_kernel = REQUIRED if parameter.default is parameter.empty else parameter.default
    if isinstance(in_row, bool) != isinstance(in_kernel, bool) or in_row != in_kernel:
        raise ConfigError(f"the default of {name!r} is {in_row!r} in its row and {in_kernel!r} in its kernel")


def _defaults(loss: Loss) -> dict[str, Any]:
    return {name: p.default for name, p in loss.parameters.items() if p.default is not REQUIRED}


def _check_strings(row: Loss | Dialect) -> None:
    for name in STRINGS[type(row)]:
        if not isinstance(value := getattr(row, name), str):
            raise ConfigError(f"{name} is {value!r}; wanted a string")


def _check_tuple(name: str, value: object, of: type) -> None:
    """A tuple of these; ("logprobs") without its comma is a string."""
    noun = "string" if of is str else of.__name__
    if isinstance(value, of):
        shown = repr(value) if of is str else f"{noun}(...)"
        raise ConfigError(f"{name} is a {noun}; wanted a tuple: ({shown},)")
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{name} is {value!r}; wanted a tuple, each of it a {noun}")
    for one in value:
        if not isinstance(one, of):
            raise ConfigError(f"{name} holds {one!r}; wanted a {noun}")


def _in(where: str, check: Callable[[], object]) -> None:
    try:
        check()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _unknown_input(name: str) -> str:
    nearest = near(name, INPUTS)
    hint = did_you_mean(nearest) if nearest else ";"
    return f"{name!r}, an input that nobody provides{hint} composer_plugins/inputs.py lists all"
