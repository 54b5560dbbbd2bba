"""PRIME-RL's own losses as kwargs of `loss_fn`, and errors about their options."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.errors import did_you_mean, near
from composer_plugins.findings import Finding, Findings
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.prime_rl import DEFAULT_POLICY, LOSSES, NO_MASK
from composer_plugins.losses.choosing import Choice, find_one
from composer_plugins.losses.row import REQUIRED, Loss, Parameter

PARAMS = "policy_params"
DEFAULT_KIND = "default"  # the type of a `[trainer.loss]` that does not name one


def find(kind: object) -> NamedLoss | None:
    """The loss that `type = kind` names in PRIME-RL."""
    return next((one for one in LOSSES if one.options["type"] == kind), None)


def policy(own: NamedLoss) -> Choice:
    """Our policy loss that it is."""
    return find_one(own.row, "policy")


def set_by(own: NamedLoss, option: Option, value: Any) -> dict[str, Any]:
    """The kwargs that this value of an option is: parameters of the policy."""
    return {PARAMS: option.values(policy(own).loss, value)}


def takes(parameter: Parameter, value: Any) -> bool:
    """Whether the value is in the range of a parameter."""
    found = Findings()
    with found.collected():
        parameter.check("", value, REQUIRED)
    return not found


def accepts(value: Any) -> bool:
    """Whether the value is a number, as that of every option is."""
    return takes(Parameter("any number"), value)


def refusal(own: NamedLoss, option: Option, value: Any) -> str:
    """Why our loss cannot have this value of an option; "" if it can."""
    if not accepts(value):
        return f"{value!r} is of another type"
    loss = policy(own).loss
    for name, ours in option.values(loss, value).items():
        parameter = loss.parameters[name]
        if not takes(parameter, ours):
            return f"{name} would be {inline(ours)}, and its range here is {parameter.interval}"
    return ""


def kwargs_of(own: NamedLoss, table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`[trainer.loss.kwargs]` for this `[trainer.loss]`, and what of it cannot be carried over."""
    choice, params, differences = policy(own), dict[str, Any](), list[str]()
    for option in own.own:
        value = table.get(option.key, option.default)
        if why := refusal(own, option, value):
            differences.append(f"{option.key} = {inline(value)} is left out: {why}")
            value = option.default
        params |= {
            name: x for name, x in option.values(choice.loss, value).items() if x != choice.value(name)
        }
    kwargs = {} if own.row == DEFAULT_POLICY else {"policy": own.row}
    return kwargs | ({PARAMS: params} if params else {}), differences


def wrong_options(own: NamedLoss, table: Mapping[str, Any], key: str) -> Iterator[Finding]:
    """An error for each option of `[trainer.loss]` that this loss does not have, or that has a wrong type."""
    for name, value in table.items():
        option, at = own.option(name), f"{key}.{name}"
        if option is not None:
            if not accepts(value):
                remedy = f"set a value like PRIME-RL's {inline(option.default)}"
                yield Finding("error", at, f"it is {value!r}", remedy)
        elif name != "type":
            explained = advice(name, value, None, key)
            problem = f"{own.options['type']!r} has no such option"
            problem += f": {explained[0]}" if explained else ""
            nearest = near(name, (option.key for option in own.own))
            remedy = did_you_mean(nearest) if nearest and not explained else "correct it"
            yield Finding("error", at, problem, remedy)


def advice(name: str, value: Any, chosen: Loss | None, key: str = "trainer.loss") -> tuple[str, str] | None:
    """Return the problem and the remedy for a name that we do not have; None if nothing here explains it.

    It may be a parameter of the policy that was chosen, or an option of one of PRIME-RL's own losses.
    """
    if chosen is not None and name in chosen.parameters:
        problem = f"it is a parameter of policy {chosen.name!r}"
        return problem, f"set {PARAMS} = {inline({name: value})} in [{key}.kwargs]"
    found = [(one, option) for one in LOSSES if (option := one.option(name))]
    if not found:
        return None

    def rank(pair: tuple[NamedLoss, Option]) -> tuple[bool, ...]:
        """First a loss of the chosen policy, then one whose parameters the chosen one has for this option."""
        own, option = pair
        loss = policy(own).loss
        theirs = parameters_of(option.sets, chosen) if chosen else {}
        fits = theirs.keys() >= parameters_of(option.sets, loss).keys()
        return chosen is None or loss.name != chosen.name, not fits

    ranked = sorted(found, key=rank)
    own, option = ranked[0]
    names_policy, why = all(rank(ranked[0])), refusal(own, option, value)

    def written(own: NamedLoss, option: Option, value: Any) -> str:
        kwargs = ({"policy": own.row} if names_policy else {}) | set_by(own, option, value)
        return " and ".join(f"{ours} = {inline(x)}" for ours, x in kwargs.items())

    whose = " and ".join(repr(one.options["type"]) for one, _ in found)
    problem, start, more = f"PRIME-RL's own loss {whose} has this option", "", ""
    if names_policy:
        start = "remove it, or " if chosen else ""
        problem += f", and policy {chosen.name!r} has none like it" if chosen else ""
        others = [pair for pair in ranked[1:] if not refusal(*pair, value)]
        more = f" for {own.options['type']!r}" if others else ""
        more += "".join(f", or {written(*pair, value)} for {pair[0].options['type']!r}" for pair in others)
    if why:
        more = f", as PRIME-RL's default is {inline(option.default)}: {why}"
    elif option.remark == NO_MASK and value >= 1:
        more = f": {NO_MASK}"
    set_to = written(own, option, option.default if why else value)
    return problem, f"{start}set {set_to} in [{key}.kwargs]{more}"


def inline(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {inline(x)}' for key, x in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value, default=str) if isinstance(value, bool | str) else repr(value)
