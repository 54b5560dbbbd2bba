"""PRIME-RL's own losses as kwargs of `loss_fn`, and errors about their options."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.errors import did_you_mean, near
from composer_plugins.findings import Finding, Findings
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.prime_rl import (
    LOSSES,
    NO_MASK,
    OWN_DENOMINATORS,
    PRIME_RL,
    TEACHER_TAU,
    TESTED,
    UNTESTED,
    Generation,
)
from composer_plugins.losses.choosing import Choice, find_one
from composer_plugins.losses.row import REQUIRED, Loss, Parameter

PARAMS = "policy_params"
DEFAULT_POLICY = "dppo_tv@prime-rl"


def find(kind: object, generation: Generation) -> NamedLoss | None:
    """The loss that `type = kind` names in this PRIME-RL, or in the newest one that has it."""
    named = [one for one in LOSSES if one.options["type"] == kind]
    return next((one for one in named if is_in(one, generation)), named[-1] if named else None)


def is_in(own: NamedLoss, generation: Generation) -> bool:
    """Whether this PRIME-RL has the loss."""
    return generation.since in PRIME_RL.releases_of(own)


def default_kind(generation: Generation) -> str:
    """The type of a `[trainer.loss]` that does not name one."""
    return "ipo" if generation in UNTESTED else "default"


def versions(*owns: NamedLoss) -> str:
    """The releases that have one of these losses: "0.5", "0.6 to 559b447", "#3526 and later"."""
    has = {release for own in owns for release in PRIME_RL.releases_of(own)}
    first, *others = [release for release in PRIME_RL.releases if release in has]
    last = others[-1] if others else first
    if last == PRIME_RL.releases[-1]:
        return f"{first} and later" if others else first
    last = "559b447" if last == TESTED.since else last
    return f"{first} to {last}" if others else first


def divisor(own: NamedLoss, table: Mapping[str, Any], generation: Generation) -> str:
    """What the trainer divides the sum of this loss by, with the options of this `[trainer.loss]`."""
    kind = own.option("ratio_type")
    given = table.get(kind.key, kind.default) if kind else ""
    return OWN_DENOMINATORS.get(given, generation.denominator)


def policy(own: NamedLoss) -> Choice:
    """Our policy loss that it is, as far as no option decides it."""
    chosen = find_one(own.row, "policy")
    return Choice(chosen.loss, {**chosen.params, **own.params}, "policy", chosen.upstream)


def fixed(own: NamedLoss) -> dict[str, Any]:
    """The kwargs that name the loss. PRIME-RL's ratio is to the rollout engine."""
    has_old = "old_logprobs" in policy(own).loss.needs
    return {"policy": own.row} | ({"old_policy": "rollout"} if has_old else {})


def set_by(own: NamedLoss, option: Option, value: Any) -> dict[str, Any]:
    """The kwargs that this value of an option is: parameters of the policy, or an option of ours."""
    if params := option.values(policy(own).loss, value):
        return {PARAMS: params}
    return {option.objective.removeprefix("channels."): option.conversion.ours(value)}


def takes(parameter: Parameter, value: Any) -> bool:
    """Whether the value is in the range of a parameter."""
    found = Findings()
    with found.collected():
        parameter.check("", value, REQUIRED)
    return not found


def accepts(option: Option, value: Any) -> bool:
    """Whether the value is of the option's type: an integer is a number too, and a boolean is not."""
    if isinstance(option.default, float):
        return takes(Parameter("any number"), value)
    return type(value) is type(option.default)


def refusal(own: NamedLoss, option: Option, value: Any) -> str:
    """Why our loss cannot have this value of an option; "" if it can."""
    if not accepts(option, value):
        return f"{value!r} is of another type"
    loss = policy(own).loss
    for name, ours in option.values(loss, value).items():
        parameter = loss.parameters[name]
        if not takes(parameter, ours):
            return f"{name} would be {inline(ours)}, and its range here is {parameter.interval}"
    return ""


def kwargs_of(own: NamedLoss, table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`[trainer.loss.kwargs]` for this `[trainer.loss]`, and what of it cannot be carried over."""
    choice, params, differences = policy(own), dict(own.params), list[str]()
    kwargs = {name: x for name, x in fixed(own).items() if x != DEFAULT_POLICY}
    values = {one.key: table.get(one.key, one.default) for one in own.own}
    for option in own.own:
        value = values[option.key]
        if why := refusal(own, option, value):
            differences.append(f"{option.key} = {inline(value)} is left out: {why}")
            value = option.default
        if option.only_with and values[option.only_with[0]] not in option.only_with[1:]:
            continue
        sets = set_by(own, option, value)
        if PARAMS in sets:
            params |= {name: x for name, x in sets[PARAMS].items() if x != choice.value(name)}
        elif value == option.default:
            continue
        elif option is not TEACHER_TAU:
            kwargs |= sets
        elif scale := values["adv_tau"]:
            kwargs |= {"hint_weight": value / scale, "hint_estimator": "advantage"}
        else:  # which would switch off a hint in the advantages too
            kwargs |= {"policy_weight": 0.0, **sets}
            differences.append("the trust region and kl_tau do not act on the hint")
    if params.get("level") == "sequence":
        differences.append("0.4 divides the loss of each sequence by its number of tokens")
    return kwargs | ({PARAMS: params} if params else {}), differences


def wrong_options(own: NamedLoss, table: Mapping[str, Any], key: str) -> Iterator[Finding]:
    """An error for each option of `[trainer.loss]` that this loss does not have, or that has a wrong type."""
    for name, value in table.items():
        option, at = own.option(name), f"{key}.{name}"
        if option is not None:
            if not accepts(option, value):
                remedy = f"set a value like PRIME-RL's {inline(option.default)}"
                yield Finding("error", at, f"it is {value!r}", remedy)
        elif name != "type":
            explained = advice(name, value, None, key)
            problem = f"{own.options['type']!r} has no such option in PRIME-RL {versions(own)}"
            problem += f": {explained[0]}" if explained else ""
            nearest = near(name, (option.key for option in own.own))
            remedy = did_you_mean(nearest) if nearest and not explained else "correct it, or set --version"
            yield Finding("error", at, problem, remedy)


def advice(name: str, value: Any, chosen: Loss | None, key: str = "trainer.loss") -> tuple[str, str] | None:
    """Return the problem and the remedy for a name that we do not have; None if nothing here explains it.

    It may be a parameter of the policy that was chosen, or an option of one of PRIME-RL's own losses.
    """
    if chosen is not None and name in chosen.parameters:
        problem = f"it is a parameter of policy {chosen.name!r}"
        return problem, f"set {PARAMS} = {inline({name: value})} in [{key}.kwargs]"
    found = [(one, option) for one in reversed(LOSSES) if (option := one.option(name))]
    if not found:
        return None

    def rank(pair: tuple[NamedLoss, Option]) -> tuple[bool, ...]:
        """First a loss of the chosen policy, then one whose parameters the chosen one has for this option."""
        own, option = pair
        loss = policy(own).loss
        theirs = parameters_of(option.sets, chosen) if chosen else {}
        fits = theirs.keys() >= parameters_of(option.sets, loss).keys()
        is_another = chosen is None or loss.name != chosen.name
        is_refused, is_older = bool(refusal(own, option, value)), not is_in(own, TESTED)
        return is_another, not fits, is_refused, value != option.default, is_older

    ranked = sorted(found, key=rank)
    own, option = ranked[0]
    is_another_loss, does_not_fit, *_ = rank(ranked[0])
    names_policy, why = is_another_loss and does_not_fit, refusal(own, option, value)

    def written(own: NamedLoss, option: Option, value: Any) -> str:
        kwargs = set_by(own, option, value)
        if option is TEACHER_TAU:
            kwargs["hint_estimator"] = "score" if chosen and chosen.per_sequence else "advantage"
        if names_policy and PARAMS in kwargs:
            kwargs = fixed(own) | kwargs
        return " and ".join(f"{ours} = {inline(x)}" for ours, x in kwargs.items())

    kinds = dict.fromkeys(one.options["type"] for one, _ in found)
    having = {kind: [one for one, _ in found if one.options["type"] == kind] for kind in kinds}
    whose = ", ".join(f"{kind!r} ({versions(*owns)})" for kind, owns in having.items())
    problem, start, more = f"PRIME-RL's own loss {whose} has this option", "", ""
    if names_policy:
        start = "remove it, or " if chosen else ""
        problem += f", and policy {chosen.name!r} has none like it" if chosen else ""
        here = {*PRIME_RL.releases_of(own)}
        others = [pair for pair in ranked[1:] if here & {*PRIME_RL.releases_of(pair[0])}]
        others = [pair for pair in others if not refusal(*pair, value)]
        more = f" for {own.options['type']!r}" if others else ""
        more += "".join(f", or {written(*pair, value)} for {pair[0].options['type']!r}" for pair in others)
    if why:
        more = f", as PRIME-RL's default is {inline(option.default)}: {why}"
    elif option.remark == NO_MASK and value >= 1:
        more = f": {NO_MASK}"
    elif option is TEACHER_TAU and not (chosen and chosen.per_sequence):
        more = ", and divide hint_weight by adv_tau, if you set that: it multiplies the hint too"
    set_to = written(own, option, option.default if why else value)
    return problem, f"{start}set {set_to} in [{key}.kwargs]{more}"


def inline(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {inline(x)}' for key, x in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value, default=str) if isinstance(value, bool | str) else repr(value)
