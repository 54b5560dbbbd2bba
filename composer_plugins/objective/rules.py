"""Rules about what a run trains that hold in every framework: each is written here once."""

from collections.abc import Iterator

from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import Framework
from composer_plugins.losses.choosing import Choice


def own_denominator(choice: Choice, framework: Framework) -> str:
    """The aggregation mode that belongs to a loss: its paper's, or that of the dialect that was named.

    "" where there is none: a dialect of this framework with its default mode is reduced as the framework is
    set to.
    """
    own = choice.dialect.mode if choice.dialect else choice.loss.mode
    return "" if choice.upstream == framework.name and own == framework.default_mode else own


def denominator_of_another(choice: Choice, framework: Framework, mode: str, key: str) -> Iterator[Finding]:
    """Yield a warning where a loss is divided otherwise than its paper, or its dialect, divides it.

    `mode` is the aggregation mode that the option `key` of the framework stands for.
    """
    own = own_denominator(choice, framework)
    if not own or own == mode:
        return
    names = {ours: name for name, ours in reversed([*framework.denominators.items()])}
    problem = f"it is {names.get(mode, mode)!r}, and {choice.name!r} is reduced by {own!r}"
    remedy = f"choose another loss: {framework.title} does not have {own!r}"
    if own in names:
        remedy = f"set it to {names[own]!r}"
    dialects = [one for one in choice.loss.dialects if one.upstream == framework.name]
    if any(one.mode in ("", framework.default_mode) for one in dialects):
        name = f"{choice.loss.name}@{framework.name}"
        if not any(one.mode for one in framework.losses if one.row == name):
            remedy += f", or name {name}, which is reduced as {framework.title} is set to"
    yield Finding("warning", key, problem, remedy)


def advantage_of_another_paper(policy: Choice, used: str, key: str, remedy: str) -> Iterator[Finding]:
    """Yield a warning where the policy loss was published with another advantage than the one in use.

    `used` is the advantage's name here; "" where it is none of the catalogue's. A dialect is as its upstream.
    """
    wanted = policy.loss.advantage
    if wanted and used not in ("", wanted) and ":" not in used and not policy.upstream:
        problem = f"it is {used!r}, and the advantage in the paper of {policy.name!r} is {wanted!r}"
        yield Finding("warning", key, problem, remedy)
