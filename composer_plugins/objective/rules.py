"""Rules about what a run trains that hold in every framework: each is written here once."""

from collections.abc import Collection, Iterator

from composer_plugins.errors import Finding
from composer_plugins.frameworks.contract import Framework
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import NORM


def own_denominator(choice: Choice, framework: Framework) -> str:
    """The aggregation mode that belongs to a loss: its paper's, or the mode of the dialect that was named.

    "" without one: a dialect of this framework with its default mode is reduced as the framework is
    set to.
    """
    own = choice.dialect.mode if choice.dialect else choice.loss.mode
    return "" if choice.upstream == framework.name and own == framework.default_mode else own


def denominator_of_another(
    choice: Choice, framework: Framework, mode: str, key: str, ours: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield a warning where a loss is divided otherwise than its paper, or its dialect, divides it.

    `mode` is the aggregation mode that the option `key` of the framework stands for, and `ours` are those
    that the option `mode` of our loss takes there.
    """
    own = own_denominator(choice, framework)
    if not own or own == mode:
        return
    names = {ours: name for name, ours in reversed([*framework.denominators.items()])}
    problem = f"it is {names.get(mode, mode)!r}, and {choice.name!r} is reduced by {own!r}"
    remedy = f"choose another loss: {framework.title} does not have {own!r}"
    if own in names:
        remedy = f"set it to {names[own]!r}"
    elif own in ours:
        remedy = f"set mode={own!r}" + (" with max_length" if own == NORM else "")
    dialects = [one for one in choice.loss.dialects if one.upstream == framework.name]
    if any(one.mode in ("", framework.default_mode) for one in dialects):
        name = f"{choice.loss.name}@{framework.name}"
        if not any(one.mode for one in framework.losses if one.row == name):
            remedy += f", or name {name}, which is reduced as {framework.title} is set to"
    yield Finding("warning", key, problem, remedy)


def sum_over_tokens(
    choice: Choice, framework: Framework, mode: str, divisor: str, key: str
) -> Iterator[Finding]:
    """Yield a warning for a loss with another reduction than `mode`, where the framework itself divides.

    `divisor` says what it divides the sum over tokens by. A dialect has no warning.
    """
    if choice.upstream or choice.mode in ("", mode):
        return
    verb = "names" if choice.is_import_path else "is published with"
    problem = f"{choice.name!r} {verb} the reduction {choice.mode}, and {framework.title} divides the sum "
    remedy = "expect longer completions to weigh more, or train in TRL or verl, which have that reduction"
    yield Finding("warning", key, f"{problem}over tokens by {divisor}", remedy)
