"""The options of a framework that are not at their default, and how a user writes our options."""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from composer_plugins.errors import ConfigError, Finding
from composer_plugins.frameworks.contract import Framework, Option, parameters_of
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import KINDS, Loss


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


def pasted(
    framework: Framework,
    loss: Loss,
    moved: Mapping[str, Any],
    params: Mapping[str, Any],
    of_dialect: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the parameters of our loss that set what a framework's moved options set in its own loss.

    `moved` has the options, by key, that are not at the default of the installed config class, with their
    values. `params` are the parameters that the user has named, which count, and `of_dialect` the parameters
    of the dialect that the user has named.
    """
    values = dict[str, Any]()
    for one in _own(framework, loss, moved):
        with suppress(ConfigError):  # a value that the framework, or our loss, does not have either
            values |= framework.parameters(loss, {one.key: moved[one.key]})
    whole = {**of_dialect, **values, **params}
    low, high = whole.get("clip_low"), whole.get("clip_high")
    if values and low is not None and high is not None and low + high < 0:
        values["clip_low"] = 1.0  # the dialect's lower bound is above this upper one, so it is removed
    return {**values, **params} if values else {}


def not_read(
    framework: Framework,
    loss: Loss,
    moved: Mapping[str, Any],
    line: Mapping[str, Any],
    write: Callable[[Mapping[str, Any]], str],
) -> Iterator[Finding]:
    """Yield one error for the framework's own options of a loss that are moved, where our loss runs.

    The parameters of our losses come from our options alone. `line` are those that set the same numbers
    (`pasted`), and `write` makes of them the line of the remedy.
    """
    own = _own(framework, loss, moved)
    if not own:
        return
    alone = [one.key for one in own if not parameters_of(one.sets, loss)]
    shown = ", ".join(f"{one.key}={moved[one.key]!r}" for one in own)
    them = "it" if len(own) == 1 else "them"
    what = KINDS[loss.kind].plural.removeprefix("policy ")
    like = f", which has nothing like {', '.join(alone)}," if line and alone else ""
    problem = f"{framework.title} reads {them} for its own {what}, and {loss.name!r}{like} does not ({shown})"
    remedy = f"remove {them}, and set {write(line)}" if line else f"remove {them}"
    yield Finding("error", ", ".join(map(framework.key, own)), problem, remedy)


def _own(framework: Framework, loss: Loss, moved: Mapping[str, Any]) -> list[Option]:
    """The moved options that set parameters of the framework's own losses."""
    return [one for one in framework.options_of(loss.kind) if one.key in moved and one.acts_by_parameters]


def described(framework: Framework, choice: Choice, mode: str = "") -> str:
    """The log line of our loss: what trains, reduced by `mode`, and what is not read for it."""
    line = f"{choice.loss.kind} {choice.described}{f', {mode}' if mode else ''}; {framework.title}'s options"
    return f"{line} for the parameters of its own {KINDS[choice.loss.kind].plural} are not read"


def as_keyword(option: str, value: Any) -> str:
    """How our option is set in a call in Python."""
    return f"{option}={value!r}"


def for_a_shell(table: str) -> Callable[[str, Any], str]:
    """How our option in this table of a YAML is set in a command line, quoted for the shell."""
    return lambda option, value: shlex.quote(f"{table}.{option}={as_yaml(value)}")


def as_yaml(value: Any) -> str:
    """A value in one line of YAML that every reader takes for the same number: 0.0003, and not 3e-04."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(one)}' for key, one in value.items())}}}"
    if isinstance(value, float) and math.isfinite(value):
        text = format(Decimal(repr(value)), "f")
        return text if "." in text else f"{text}.0"
    return json.dumps(value)
