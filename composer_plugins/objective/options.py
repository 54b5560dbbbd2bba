"""The options of a framework that set parameters of our losses, beside the parameters that a user names."""

import json
import math
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks.contract import Framework, Option, parameters_of
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import KINDS, REQUIRED, Loss


class SetBy(NamedTuple):
    """A parameter that an option of a framework sets: the option as the user writes it, and our value."""

    key: str
    value: Any


def given_options(options: Iterable[Option], value_of: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The options that are not at their default, by key, with their value.

    `value_of(key, default)` is the value in the framework's config, or the default where it has no such key.
    Where an option is null, the value of its fallback counts, as in the framework.
    """
    options = tuple(options)
    found = {one.key: value_of(one.key, one.default) for one in options}
    read = {one.fallback for one in options if one.fallback and found[one.key] is None}
    given = {}
    for one in options:
        value = found[one.fallback] if found[one.key] is None and one.fallback else found[one.key]
        if value != one.default and one.key not in read:
            given[one.key] = value
    return given


def not_read(
    framework: Framework,
    loss: Loss,
    params: Mapping[str, Any],
    moved: Mapping[str, Any],
    write: Callable[[Mapping[str, Any]], str],
) -> Iterator[Finding]:
    """Yield one error for the framework's own options of a loss that are moved beside a loss of ours.

    The parameters of our losses come from our options alone. `moved` has the options, by key, that are not at
    the default of the installed config class, with their values. `params` are the parameters
    that the user has named, and `write` makes of parameters the line that sets them here: the remedy has one
    that sets the same numbers.
    """
    own = [one for one in framework.options_of(loss.kind) if one.key in moved and one.acts_by_parameters]
    if not own:
        return
    values = dict[str, Any]()
    for option in own:
        with suppress(KeyError):  # a value that the framework does not have either
            values |= option.values(loss, moved[option.key])
    shown = ", ".join(f"{one.key}={moved[one.key]!r}" for one in own)
    them = "it" if len(own) == 1 else "them"
    what = KINDS[loss.kind].plural.removeprefix("policy ")
    problem = f"{framework.title} reads {them} for its own {what}, and {loss.name!r} does not ({shown})"
    remedy = f"remove {them}, and set {write({**values, **params})}" if values else f"remove {them}"
    yield Finding("error", ", ".join(map(framework.key, own)), problem, remedy)


def described(framework: Framework, choice: Choice, mode: str = "") -> str:
    """The log line of a loss of ours: what trains, reduced by `mode`, and what is not read for it."""
    line = f"{choice.loss.kind} {choice.described}{f', {mode}' if mode else ''}; {framework.title}'s options"
    return f"{line} for the parameters of its own {KINDS[choice.loss.kind].plural} are not read"


def for_a_shell(table: str) -> Callable[[str, Any], str]:
    """How an option of ours in this table of a YAML is set in a command line, quoted for the shell."""
    return lambda option, value: shlex.quote(f"{table}.{option}={as_yaml(value)}")


def as_yaml(value: Any) -> str:
    """A value in one line of YAML that every reader takes for the same number: 0.0003, and not 3e-04."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(one)}' for key, one in value.items())}}}"
    if isinstance(value, float) and math.isfinite(value):
        text = format(Decimal(repr(value)), "f")
        return text if "." in text else f"{text}.0"
    return json.dumps(value)


def parameters_set(
    framework: Framework,
    loss: Loss,
    params: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    table: str = "",
    params_key: str,
) -> dict[str, SetBy]:
    """The parameters of a loss that the framework's own options set, each with its option.

    `given` has the options that are not at their default (`given_options`), whose keys are below `table`.
    `params` are the parameters that the user has named, whose keys are below `params_key`. Raises
    ConfigError, at the framework's key, for an option that the loss does not have, for one that `params`
    contradict, and for a value out of its range.
    """
    found, wrong = dict[str, SetBy](), Findings()
    for option in framework.options_of(loss.kind):
        if option.key not in given or not option.acts_by_parameters or loss.name in option.fulfilled_by:
            continue
        key, value = f"{table}{option.key}", given[option.key]
        sets = parameters_of(option.sets, loss)
        if not sets:
            problem = (
                f"it is {value!r}, and it has no effect on the {loss.kind} {loss.name!r}, which has no such "
            )
            problem += "parameter"
            wrong.append(Finding("error", key, problem, _instead(framework, option, loss, params_key)))
        for name, conversion in sets.items():
            if conversion.values and (not isinstance(value, Hashable) or value not in conversion.values):
                known = " or ".join(map(repr, (option.default, *conversion.values)))
                wrong.append(Finding("error", key, f"it is {value!r}", f"set {known}"))
                continue
            ours = conversion.ours(value)
            if name in params and params[name] != ours:
                problem = f"it is {value!r}, which sets {name} to {ours!r}, and {params_key}.{name} is "
                wrong.append(Finding("error", key, f"{problem}{params[name]!r}", "set one of them"))
            try:
                loss.parameters[name].check(key, ours, loss.defaults.get(name, REQUIRED))
            except ConfigError as error:
                converted = ours is not value and ours != value
                problem = f"it is {value!r}, which sets {name} to {ours!r}" if converted else error.problem
                remedy = f"{error.remedy} as {conversion.formula(option.key)}" if converted else error.remedy
                wrong.append(Finding("error", key, problem, remedy))
            found[name] = SetBy(key, ours)
    enforce(wrong)
    return found


def without_effect(
    framework: Framework, kind: str, given: Mapping[str, Any], table: str = ""
) -> Iterator[Finding]:
    """Yield a warning for each option that is set and that the framework's own losses do not read either."""
    for option in framework.options:
        if option.kind == kind and option.key in given and option.without_effect:
            problem = f"it is {given[option.key]!r}, and it has no effect: {option.without_effect}"
            yield Finding("warning", f"{table}{option.key}", problem, option.instead)


def only_with(framework: Framework, value_at: Callable[[str], Any]) -> Iterator[Finding]:
    """Yield a warning for each option that is set and is read only beside another one, which is not so set.

    `value_at(key)` is the value in the framework's config, None where it has no such key.
    """
    for option in framework.options:
        if option.only_with is None:
            continue
        key = framework.key(option)
        if (value := value_at(key)) in (None, option.default, 0):
            continue
        name, needed = option.only_with
        other = framework.key(framework.option(name, option.kind))
        found = value_at(other)
        if not option.is_read_beside(found):
            state = "not set" if found is None else repr(found)
            problem = f"it is {value!r}, and it has no effect, because {other} is {state}"
            to_set = other if needed is None else f"{other}={needed}"
            yield Finding("warning", key, problem, f"set {to_set}, or remove it")


def _instead(framework: Framework, option: Option, loss: Loss, params_key: str) -> str:
    """The remedy for an option that sets no parameter of a loss."""
    has = ", ".join(loss.parameters)
    ours = f"set {params_key}, whose keys are {has}" if has else "name another loss: it has no parameters"
    return f"leave it at {framework.title}'s default, {option.default!r}, or {option.instead or ours}"
