"""`check_as`: the laws on a loss function that is written in a framework's own calling convention.

A framework's convention is in its adapter (`Convention`), or in this package where there is no adapter.
Most conventions reduce inside the function: then it is a `OneNumber`. A law of policy losses that is not run
on one is reported as not applicable, with the reason.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from composer_plugins.calling_convention import Convention, Function
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.frameworks.registry import conventions
from composer_plugins.losses.derived import row_of_function
from composer_plugins.losses.registry import losses
from composer_plugins.testing.checking import (
    check_row,
    exceptions_without_a_law,
    function_named,
    require_known,
    run_laws,
)
from composer_plugins.testing.conventions.function import OneNumber, row_of
from composer_plugins.testing.laws import FUNCTION, LAWS, NOT_RUN, laws_for
from composer_plugins.testing.laws.tokens import packed_tokens_equal_a_padded_row
from composer_plugins.testing.report import Outcome, Report

PACKED = packed_tokens_equal_a_padded_row.__name__


def find_convention(framework: str) -> Convention:
    """The convention of a framework; ConfigError with those there are."""
    known = conventions()
    if framework not in known:
        raise unknown("--as", framework, known, noun="convention")
    module, _, name = known[framework].partition(":")
    try:
        found: Convention = getattr(import_module(module), name)
    except ImportError as error:
        problem = f"{framework} cannot be imported here: {error}"
        raise ConfigError("--as", problem, f"run this where {framework} is installed") from None
    return found


def find_function(named: "str | Callable[..., Any]", convention: Convention) -> Callable[..., Any]:
    """The function itself, by import path or by its name in the framework's registry."""
    if not isinstance(named, str):
        if not callable(named):
            raise ConfigError("check", f"it is {named!r}", f"pass a function: {convention.signature}")
        return named
    if ":" in named:
        return function_named(named, "check")
    if convention.find is None:
        problem = f"{named!r} is not an import path, and {convention.framework} has no registry of losses"
        raise ConfigError("check", problem, "write module:function or FILE.py:function")
    return convention.find(named)


def check_as(
    named: "str | Callable[..., Any]", framework: str | Convention, only: Iterable[str] = ()
) -> Report:
    """Run the laws on a function of a framework's convention, or `only` those of these names.

    `named` is an import path, a function, or a name in the framework's registry ("vanilla" of verl).
    Raises ConfigError for a function or a convention that cannot be found.
    """
    convention = framework if isinstance(framework, Convention) else find_convention(framework)
    function = find_function(named, convention)
    if next(iter(_parameters(function)), "") == "logprobs" and convention.framework not in ("torch", "trl"):
        problem = (
            f"its first parameter is logprobs, as that of a kernel here, and {convention.framework} calls "
        )
        raise ConfigError("--as", problem + convention.signature, "leave out --as, or adapt the function")
    if convention.specialise is not None:
        convention = convention.specialise(function)
    name = named if isinstance(named, str) else getattr(function, "__qualname__", repr(function))
    subject = f"{name} (as {convention.framework} calls it)"
    if convention.kernel is not None:
        return _kernel_report(function, convention, name, subject, tuple(only))
    row, only = row_of(function, convention, name), tuple(only)
    laws, not_run = laws_for(FUNCTION, convention.framework), NOT_RUN[FUNCTION]
    require_known(only, laws_for(FUNCTION) | LAWS)
    for one in only:
        if one not in laws and (others := laws_for(FUNCTION).get(one)):
            problem = f"the law {one} is for --as {' and '.join(others.frameworks)} alone"
            raise ConfigError("only", problem, "remove it: check --laws says which laws are run")
    chosen = [law for law in laws.values() if not only or law.name in only]
    outcomes = (
        *exceptions_without_a_law(row, laws, f"--as {convention.framework}"),
        *run_laws(chosen, row, OneNumber),
        *(Outcome(one, "not applicable", not_run[one]) for one in not_run if not only or one in only),
    )
    return Report(subject, outcomes)


def _parameters(function: Function) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some functions that are written in C
        return ()


def _kernel_report(
    function: Function, convention: Convention, name: str, subject: str, only: tuple[str, ...]
) -> Report:
    """The laws of kernels, on a function that returns one loss per token."""
    assert convention.kernel is not None
    row = row_of_function(convention.kernel(function), "policy", "check", losses())
    more = [outcome for outcome in convention.more(function) if not only or outcome.check in only]
    own = [outcome.check for outcome in more]
    left = [one for one in only or laws_for(row.kind) if one not in (*own, PACKED)]
    found = check_row(replace(row, name=name), left).outcomes if left else ()
    reason = NOT_RUN[FUNCTION][PACKED]
    more += [Outcome(PACKED, "not applicable", reason)] if not only or PACKED in only else []
    return Report(subject, (*found, *more))
