"""The options of TRL, verl and PRIME-RL beside a loss of ours, from the table of each framework.

Tests compare these tables with the frameworks' sources. `ours_in_trl` alone needs a framework.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from composer_plugins.adapters.prime_rl_plugin.migration import inline
from composer_plugins.frameworks import contract, verl
from composer_plugins.frameworks.contract import Option
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.frameworks.registry import called
from composer_plugins.frameworks.trl import LOSS_OPTIONS, OF_MODES, TRL
from composer_plugins.frameworks.verl import VERL
from composer_plugins.losses.choosing import Choice, find_one
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss, Parameter, of_kind
from docs.generator.markdown import table


def ours_in_trl() -> str:
    """Each option that ComposerGRPOConfig adds, with the text of its --help."""
    from trl import GRPOConfig

    from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig

    of_trl = {field.name for field in fields(GRPOConfig)} - {"loss_type"}
    own = [one for one in fields(ComposerGRPOConfig) if one.name not in of_trl]
    body = [(f"`{one.name}`", _code(repr(one.default)), _text(one.metadata["help"])) for one in own]
    return table(("option", "default", "meaning"), body)


def of_trl() -> str:
    """What each of TRL's options does beside a policy of ours."""
    body = []
    for name, option in LOSS_OPTIONS.items():
        for row in option.sets:
            ours = " and ".join(f"`{one}` = `{row.conversion.formula(name)}`" for one in row.parameters)
            effect = f"an error, whose line to paste has {ours} in `policy_params`"
            body.append((f"`{name}`", ", ".join(f"`{loss}`" for loss in row.losses), effect))
    by_effect: dict[str, list[str]] = {}
    for name, option in LOSS_OPTIONS.items():
        if not option.sets:
            effect = option.effect or "an error: each loss has a level of its own"
            by_effect.setdefault(effect, []).append(f"`{name}`")
    body += [(", ".join(names), "all", effect) for effect, names in by_effect.items()]
    return table(("option of TRL", "losses", "effect"), body)


def losses_of(kind: str) -> str:
    """Each loss of this kind that runs in TRL: its formula, denominator, defaults, and dialect @trl.

    A parameter whose default is None is in the table of parameters only.
    """
    heads = {"policy": ("denominator",), "preference": ("log-probabilities",), "divergence": ()}
    body = []
    for loss in losses():
        if loss.kind == kind and TRL.runs(loss):
            more = {"policy": (_denominator(loss.mode),), "preference": (_scores(loss.average),)}.get(
                kind, ()
            )
            defaults = _values({n: v for n, v in loss.defaults.items() if v is not None})
            body.append((f"`{loss.name}`", _formula(loss), *more, defaults, _dialect(loss)))
    return table(("name", "formula", *heads[kind], "defaults", "`@trl`"), body)


def parameters_of(kind: str) -> str:
    """Each parameter of the losses of this kind that run in TRL: its values, meaning, losses, other names.

    A parameter that means the same in several losses has one row.
    """
    rows: dict[tuple[str, Parameter, tuple[str, ...]], list[str]] = {}
    for loss in losses():
        if loss.kind == kind and TRL.runs(loss):
            names = called(loss)
            for name, parameter in loss.parameters.items():
                key = (name, replace(parameter, example=None, unlikely=()), tuple(names.get(name, ())))
                rows.setdefault(key, []).append(f"`{loss.name}`")
    body = [
        (
            f"`{name}`",
            ", ".join(_code(repr(choice)) for choice in parameter.choices) or parameter.interval,
            _text(parameter.help),
            ", ".join(names),
            ", ".join(map(_code, elsewhere)),
        )
        for (name, parameter, elsewhere), names in rows.items()
    ]
    return table(("parameter", "values", "meaning", "losses", "called elsewhere"), body)


def _formula(loss: Loss) -> str:
    """The first indented block of the kernel's docstring, or its first line."""
    text = inspect.getdoc(loss.kernel()) or ""
    block = re.search(r"(?:^    .*\n?)+", text, re.MULTILINE)
    lines = block[0].splitlines() if block else text.splitlines()[:1]
    return "<br>".join(_code(" ".join(line.split())) if block else _text(line) for line in lines)


def _dialect(loss: Loss) -> str:
    """What the dialect @trl has otherwise than the name alone; empty without such a dialect."""
    if all(dialect.upstream != "trl" for dialect in loss.dialects):
        return ""
    theirs = Choice(loss, {}, upstream="trl")
    dialect = loss.dialect("trl")
    found = [_values({n: v for n, v in dialect.params.items() if v != loss.defaults[n]})]
    found += [f"denominator {_denominator(theirs.mode)}"] if theirs.mode != loss.mode else []
    found += [_scores(theirs.average)] if theirs.average != loss.average else []
    found += [f"takes {', '.join(f'`{name}`' for name in dialect.optional)}"] if dialect.optional else []
    return ", ".join(filter(None, found)) or "the same"


def _denominator(mode: str) -> str:
    return f"`{OF_MODES[mode]}`" if mode in OF_MODES else "a sum"


def _scores(average: bool) -> str:
    return "averaged" if average else "summed"


def _values(values: Mapping[str, Any]) -> str:
    return _code(", ".join(f"{name}={value}" for name, value in values.items()))


def _code(text: str) -> str:
    return "`{}`".format(text.replace("`", "")) if text else ""


def _text(text: str) -> str:
    return text.replace("<", "&lt;")


def of_verl() -> str:
    """The options of verl's own losses, with our parameters that say the same."""
    rows: dict[tuple[str, str], list[str]] = {}
    for option in (one for one in verl.OPTIONS if not one.effect):
        key = f"`{VERL.key(option).removeprefix('actor_rollout_ref.')}`"
        shared = (_meaning(option), option.kind)
        rows.setdefault(shared, []).append(f"{key}: {_shown(option.default)}")
    body = [(", ".join(keys), text) for (text, _), keys in rows.items()]
    return table(("option of verl: its default", "parameter here"), body)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def _meaning(option: Option) -> str:
    """In words: which parameter of our losses says the same."""
    parts, values = [], dict[object, object]()
    running = [one for one in of_kind(losses(), option.kind).values() if VERL.runs(one)]
    for one in option.sets:
        if named := [loss.name for loss in running if one.is_of(loss)]:
            parts.append(f"{', '.join(f'`{name}`' for name in one.parameters)} of {', '.join(named)}")
            values |= one.conversion.values
    if not parts:
        return "none"
    text = "; ".join(parts)
    if values:
        text += " (" + ", ".join(f"{_shown(a)} is {b!r}" for a, b in values.items()) + ")"
    return f"{text}. Null: the value of `{option.fallback}`" if option.fallback else text


def of_prime_rl() -> str:
    """The options of PRIME-RL's own losses, and what they are called here."""
    body: list[tuple[str, ...]] = []
    for own in PRIME_RL.losses:
        loss = find_one(own.row, "policy").loss
        start = (f"`{own.options['type']}`", f"`policy = {inline(own.row)}`")
        for option in own.own:
            here = ", ".join(f"`policy_params.{name}`" for name in contract.parameters_of(option.sets, loss))
            body.append((*start, f"`{option.key} = {inline(option.default)}`", here))
            start = ("", "")
    head = ("its loss", "here", "its option, with its default", "here, below `kwargs`")
    return table(head, body)
