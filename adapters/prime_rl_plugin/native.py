"""PRIME-RL's own losses and their options in `[trainer.loss]`, by version, as options of ours.

This table is data. The messages about an option that is not ours, the doctor and docs/prime_rl.md use it.
The rows up to 559b447 are compared with PRIME-RL itself. The later ones come from source text.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from composer_plugins.adapters.prime_rl_plugin.upstream import (
    AFTER_559B447,
    GENERATIONS,
    OWN_TOKENS,
    Generation,
)
from composer_plugins.errors import ConfigError, caught, did_you_mean, near
from composer_plugins.frameworks.registry import other_names
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss, Parameter, of_kind

Rule = Literal["same", "value - 1", "1 - value", "'ipo_centered' where it is true"]
PARAMS = "policy_params"


class Option(NamedTuple):
    """An option of one of PRIME-RL's losses."""

    name: str
    default: float | str | bool
    ours: tuple[str, ...]  # the keys below [trainer.loss.kwargs] that hold it; () if none does
    rule: Rule = "same"  # what is written there
    remark: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether the value is of the option's type: an integer is a number too, and a boolean is not."""
        if isinstance(self.default, float):
            return not caught(partial(Parameter("any number").check, self.name, value, self.default))
        return type(value) is type(self.default)

    def converted(self, value: Any) -> Any:
        """The value under our key."""
        if self.rule == "'ipo_centered' where it is true":
            return "ipo_centered" if value else "ipo@prime-rl"
        if self.rule == "same" or not isinstance(value, int | float):
            return value
        # 12 digits, so that 1.2 - 1 is written as 0.2. The bound moves by less than 1e-12.
        return round(value - 1.0 if self.rule == "value - 1" else 1.0 - value, 12)


class Native(NamedTuple):
    """One of PRIME-RL's own losses, and the kwargs with which `loss_fn` is that loss."""

    kind: str  # the `type` in [trainer.loss]
    generations: tuple[Generation, ...]
    function: str  # the function of ours for `import_path`
    kwargs: Mapping[str, Any]
    options: tuple[Option, ...]
    # By ratio_type, what the trainer divides its sum by, where that is not the divisor of a custom loss.
    denominators: Mapping[str, str] = {}

    def divisor(self, table: Mapping[str, Any], generation: Generation) -> str:
        """What the trainer divides the sum of this loss by, with the options of this `[trainer.loss]`."""
        return self.denominators.get(table.get("ratio_type", "token"), generation.denominator)

    @property
    def versions(self) -> str:
        """The releases that have it: "0.5", "0.6 to 559b447"."""
        since = self.generations[0].since
        return since if len(self.generations) == 1 else f"{since} to 559b447"

    @property
    def policy(self) -> str:
        """Our name of the loss."""
        return str(self.kwargs.get("policy", "dppo_tv@prime-rl"))

    def option(self, name: str) -> Option | None:
        """The option of this name."""
        return next((one for one in self.options if one.name == name), None)

    def refusal(self, option: Option, value: Any) -> str:
        """Why our loss cannot have this value of an option; "" if it can."""
        if not option.accepts(value):
            return f"{value!r} is of another type"
        row = of_kind(losses(), "policy")[self.policy.partition("@")[0]]
        for table, _, name in (key.rpartition(".") for key in option.ours):
            ours, parameter = option.converted(value), row.parameters.get(name)
            if table and parameter and caught(partial(parameter.check, name, ours, REQUIRED)):
                return f"{name} would be {inline(ours)}, and its range here is {parameter.interval}"
        return ""


def _same(name: str, default: float | str, ours: str = "", remark: str = "") -> Option:
    return Option(name, default, (f"{PARAMS}.{ours or name}",), remark=remark)


NO_MASK = "a value of 1 or more masks nothing"
_TEACHER = Option(
    "teacher_tau", 0.0, ("hint_weight",), remark='divided by adv_tau; with hint_estimator = "advantage"'
)
_ADV, _KL = _same("adv_tau", 1.0), _same("kl_tau", 1e-3)
_SCALE = Option("adv_tau", 1.0, ("policy_weight",))
_ROLLOUT = {"old_policy": "rollout"}
_0_4, _0_5, _0_6, _0_7, _NEWEST = GENERATIONS

NATIVE = (
    Native(
        "default",
        (_0_4,),
        "loss_fn",
        {"policy": "masked_is@prime-rl<0.5"},
        (
            _same("ratio_type", "token", "level", 'with "sequence", 0.4 divides each sequence by its tokens'),
            _same("token_mask_low", 0.125, "token_low"),
            _same("token_mask_high", 8.0, "token_high"),
            _same("geo_mask_low", 0.1, "geo_low"),
            _same("geo_mask_high", 10.0, "geo_high"),
            _same("sequence_mask_low", 0.0, "sequence_low"),
            _same("sequence_mask_high", 100.0, "sequence_high"),
            _same("sequence_clip_high", 10.0, "ratio_cap", 'only with ratio_type = "sequence"'),
            _ADV,
            _same("kl_tau", 0.0),
            _TEACHER,
        ),
        {"token": OWN_TOKENS},
    ),
    Native(
        "default",
        (_0_5,),
        "loss_fn",
        {"policy": "ipo@prime-rl<0.6"},
        (
            _same("ipo_mask_low", 0.2, "tv_low", NO_MASK),
            _same("ipo_mask_high", 0.2, "tv_high", NO_MASK),
            _ADV,
            _KL,
            _TEACHER,
        ),
    ),
    Native(
        "default",
        (_0_6, _0_7, _NEWEST),
        "dppo",
        {},
        (
            _same("dppo_mask_low", 0.2, "tv_low", NO_MASK),
            _same("dppo_mask_high", 0.2, "tv_high", NO_MASK),
            _ADV,
            _KL,
        ),
    ),
    Native(
        "ipo",
        (_0_6, _0_7, _NEWEST),
        "loss_fn",
        {"policy": "ipo@prime-rl"},
        (Option("ipo_threshold", 0.1, (f"{PARAMS}.tv_low", f"{PARAMS}.tv_high"), remark=NO_MASK), _ADV, _KL),
    ),
    Native(
        "ipo",
        (AFTER_559B447,),
        "loss_fn",
        {
            "policy": "ipo@prime-rl",
            PARAMS: {"tv_low": 0.3, "tv_high": 0.3, "ratio_cap": 1e4, "kl_tau": 0.0},
        },
        (
            Option("eps", 0.3, (f"{PARAMS}.tv_low", f"{PARAMS}.tv_high"), remark=NO_MASK),
            _same("max_importance_ratio", 1e4, "ratio_cap"),
            _ADV,
            Option("score_centering", False, ("policy",), "'ipo_centered' where it is true"),
        ),
    ),
    Native(
        "icepop",
        (AFTER_559B447,),
        "loss_fn",
        {"policy": "masked_is", PARAMS: {"token_low": 0.2, "token_high": 5.0}},
        (_same("ratio_low", 0.2, "token_low"), _same("ratio_high", 5.0, "token_high"), _ADV),
    ),
    Native(
        "ppo",
        (AFTER_559B447,),
        "loss_fn",
        {"policy": "ppo", **_ROLLOUT, PARAMS: {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 1e4}},
        (
            Option("ratio_low", 0.8, (f"{PARAMS}.clip_low",), "1 - value"),
            Option("ratio_high", 1.2, (f"{PARAMS}.clip_high",), "value - 1"),
            _same("max_importance_ratio", 1e4, "weight_cap"),
            _SCALE,
        ),
    ),
    Native(
        "cispo",
        (AFTER_559B447,),
        "loss_fn",
        {"policy": "cispo", **_ROLLOUT, PARAMS: {"clip_low": 1.0, "clip_high": 4.0}},
        (
            Option("ratio_low", 0.0, (f"{PARAMS}.clip_low",), "1 - value"),
            Option("ratio_high", 5.0, (f"{PARAMS}.clip_high",), "value - 1"),
            _SCALE,
        ),
    ),
)
KINDS = tuple(dict.fromkeys(one.kind for one in NATIVE))


def find(kind: object, generation: Generation) -> Native | None:
    """The loss that `type = kind` names in this PRIME-RL, or in the nearest one that has it."""
    named = [one for one in NATIVE if one.kind == kind]
    return next((one for one in named if generation in one.generations), named[-1] if named else None)


def default_kind(generation: Generation) -> str:
    """The type of a `[trainer.loss]` that does not name one."""
    return "ipo" if generation is AFTER_559B447 else "default"


def kwargs_of(native: Native, table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`[trainer.loss.kwargs]` for this `[trainer.loss]`, and what of it cannot be carried over."""
    kwargs, differences = dict(native.kwargs), list[str]()
    for name, value in table.items():
        option = native.option(name)
        if option is None or value == option.default:
            continue
        if not option.ours:
            differences.append(f"{name} = {inline(value)}: {option.remark}")
        elif why := native.refusal(option, value):
            differences.append(f"{name} = {inline(value)} is left out: {why}")
        elif option is _TEACHER:
            if scale := table.get("adv_tau", 1.0):
                kwargs |= {"hint_weight": value / scale, "hint_estimator": "advantage"}
            else:  # which would switch off a hint in the advantages too
                kwargs |= {"policy_weight": 0.0, "hint_weight": value}
                differences.append("the trust region and kl_tau do not act on the hint")
        elif name == "sequence_clip_high" and table.get("ratio_type") != "sequence":
            continue
        else:
            for key in option.ours:
                _set(kwargs, key, option.converted(value))
    if table.get("ratio_type") == "sequence":
        cap = table.get("sequence_clip_high", 10.0)
        _set(kwargs, f"{PARAMS}.ratio_cap", cap)
        differences.append("0.4 divides the loss of each sequence by its number of tokens")
    return kwargs, differences


def wrong_options(native: Native, table: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """An error for each option of `[trainer.loss]` that this loss does not have, or that has a wrong type."""
    for name, value in table.items():
        option, at = native.option(name), f"{key}.{name}"
        if option is not None:
            if not option.accepts(value):
                remedy = f"set a value like PRIME-RL's {inline(option.default)}"
                yield ConfigError(at, f"it is {value!r}", remedy)
        elif name != "type":
            explained = advice(name, value, None, key)
            problem = f"{native.kind!r} has no such option in PRIME-RL {native.versions}"
            problem += f": {explained[0]}" if explained else ""
            nearest = near(name, (option.name for option in native.options))
            remedy = did_you_mean(nearest) if nearest and not explained else "correct it, or set --version"
            yield ConfigError(at, problem, remedy)


def advice(name: str, value: Any, chosen: Loss | None, key: str = "trainer.loss") -> tuple[str, str] | None:
    """Return the problem and the remedy for a name that we do not have; None if nothing here explains it.

    It may be a parameter of the policy that was chosen, or an option of one of PRIME-RL's own losses.
    """
    parameters = chosen.parameters if chosen else {}
    if name in parameters and chosen is not None:
        problem = f"it is a parameter of policy {chosen.name!r}"
        return problem, f"set {PARAMS} = {inline({name: value})} in [{key}.kwargs]"
    found = [(one, option) for one in reversed(NATIVE) if (option := one.option(name))]
    if not found:
        return None
    base = chosen.name if chosen else ""
    sets = other_names(chosen).get(name, {}) if chosen else {}

    def rank(pair: tuple[Native, Option]) -> tuple[bool, bool, bool, bool]:
        """First a loss of the chosen policy, then one whose parameters the chosen one has for this option."""
        own, option = pair
        ours = [key.rpartition(".")[2] for key in option.ours if "." in key]
        fits = all(one in sets or one == name in parameters for one in ours)
        is_refused = bool(own.refusal(option, value))
        return own.policy.partition("@")[0] != base, not fits, is_refused, value != option.default

    ranked = sorted(found, key=rank)
    native, option = ranked[0]
    is_another_loss, does_not_fit, *_ = rank(ranked[0])
    names_policy, refusal = is_another_loss and does_not_fit, native.refusal(option, value)
    whose = ", ".join(f"{one.kind!r} ({one.versions})" for one, _ in found)
    problem = f"PRIME-RL's own loss {whose} has this option"
    if not option.ours:
        return f"{problem}, and ours does not: {option.remark}", "remove it"

    def written(own: Native, option: Option, value: Any) -> str:
        kwargs: dict[str, Any] = {}
        for ours in option.ours:
            _set(kwargs, ours, option.converted(value))
        if option is _TEACHER:
            kwargs["hint_estimator"] = "score" if chosen and chosen.per_sequence else "advantage"
        if names_policy and PARAMS in kwargs:
            beside = {ours: x for ours, x in own.kwargs.items() if ours not in ("policy", PARAMS)}
            kwargs = {"policy": own.policy, **beside, **kwargs}
        return " and ".join(f"{ours} = {inline(x)}" for ours, x in kwargs.items())

    start = more = ""
    if names_policy:
        start = "remove it, or " if chosen else ""
        problem += f", and policy {base!r} has none like it" if chosen else ""
        others = [pair for pair in ranked[1:] if {*pair[0].generations} & {*native.generations}]
        others = [(own, one) for own, one in others if not own.refusal(one, value)]
        more = f" for {native.kind!r}" if others else ""
        more += "".join(f", or {written(own, one, value)} for {own.kind!r}" for own, one in others)
    if refusal:
        more = f", as PRIME-RL's default is {inline(option.default)}: {refusal}"
    elif option.remark == NO_MASK and value >= 1:
        more = f": {NO_MASK}"
    elif option is _TEACHER and not (chosen and chosen.per_sequence):
        more = ", and divide hint_weight by adv_tau, if you set that: it multiplies the hint too"
    set_to = written(native, option, option.default if refusal else value)
    return problem, f"{start}set {set_to} in [{key}.kwargs]{more}"


def rows() -> Iterator[str]:
    """The table for docs/prime_rl.md, in Markdown."""
    yield "| PRIME-RL | its loss | here | its option, with its default | here, below `kwargs` |"
    yield "|---|---|---|---|---|"
    for native in NATIVE:
        beside = {key: x for key, x in native.kwargs.items() if key not in ("policy", PARAMS)}
        fixed = {
            f"{PARAMS}.{key}": x
            for key, x in native.kwargs.get(PARAMS, {}).items()
            if not any(f"{PARAMS}.{key}" in option.ours for option in native.options)
        }
        ours = ", ".join(
            f"`{key} = {inline(x)}`" for key, x in ({"policy": native.policy} | beside | fixed).items()
        )
        start = f"| {native.versions} | `{native.kind}` | {ours} |"
        for option in native.options:
            cell = ", ".join(f"`{key}`" for key in option.ours)
            cell += f" = {option.rule}" if option.rule != "same" else ""
            cell = "; ".join(filter(None, (cell, option.remark)))
            yield f"{start} `{option.name} = {inline(option.default)}` | {cell} |"
            start = "| | | |"


def inline(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {inline(x)}' for key, x in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value, default=str) if isinstance(value, bool | str) else repr(value)


def _set(kwargs: dict[str, Any], key: str, value: Any) -> None:
    """Set "policy_params.tv_low" in a table of its own."""
    table, _, name = key.rpartition(".")
    if table:
        kwargs[table] = dict(kwargs.get(table, {})) | {name: value}
    else:
        kwargs[name] = value
