"""PRIME-RL's side of `composer-plugins migrate`: its TOML as an Objective, and an Objective as TOML."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.adapters.prime_rl_plugin.files import LOSS, TABLES, as_rl, merged_config, table_at
from composer_plugins.adapters.prime_rl_plugin.options import FUNCTION, parse
from composer_plugins.config import at
from composer_plugins.errors import ConfigError, Finding, Findings, error_of, unknown
from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.contract import NOTHING, SAMPLING, NamedLoss
from composer_plugins.frameworks.prime_rl import MODE, PRIME_RL
from composer_plugins.losses.choosing import choose, find_one
from composer_plugins.objective import objective as objectives
from composer_plugins.objective.keys import COUNT, POSITIVE, check_tables, not_carried, not_looked_at
from composer_plugins.objective.objective import Objective, named

__all__ = ["merged_config", "read", "release", "render", "write"]

# --- Tables --------------------------------------------------------------------------------------------

# The advantages that an algorithm computes, and the losses of PRIME-RL's own that train its samples instead.
ADVANTAGES = {"grpo": "dr_grpo@prime-rl", "echo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}
ALGORITHMS = {row.partition("@")[0]: kind for kind, row in reversed(ADVANTAGES.items())}
ROUTED = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}
DEFAULT_LOSS, DEFAULT_ALGORITHM = "default", "grpo"
# What an Objective has of a training source, with the default. [orchestrator] sets it for all sources.
READ: dict[str, Any] = {"algo.type": DEFAULT_ALGORITHM, "group_size": 1, "sampling.temperature": 1.0}
# What bears on the loss and is not carried over, with the values that change nothing.
SAMPLED = {**SAMPLING, **{f"extra_body.{name}": values for name, values in SAMPLING.items()}}
OF_SOURCE: dict[str, tuple[Any, ...]] = {
    "algo.length_penalty": (None,),
    "curriculum.gates": (None, {}),
    "curriculum.sampler.type": (None, "standard"),
    **{f"sampling.{name}": values for name, values in SAMPLED.items()},
}
SOURCE, OF_ALL, SAMPLES = "orchestrator.train.source", "orchestrator", "orchestrator.train"
NUMBERS = {"group_size": (COUNT, OF_ALL), "sampling.temperature": (POSITIVE, SAMPLES)}
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "trainer.enable_router_replay": (None, False),
    f"{OF_ALL}.algo.length_penalty": (None,),
    **{f"{SAMPLES}.sampling.{name}": values for name, values in SAMPLED.items()},
}
FILTERS = (f"{OF_ALL}.pre_batch_filters", f"{OF_ALL}.post_batch_filters")
FILTERED_BY_ADVANTAGE = "zero_advantage"  # a filter that drops what trains nothing
# It selects nothing for echo's cross-entropy.
OUR_FILTER = "composer_plugins.recipes.prime_rl.stored_stamps.echo_filter"
NAMED = {*NOT_CARRIED, *FILTERS, f"{OF_ALL}.algo.filter", f"{SOURCE}.algo.filter", f"{SOURCE}.name"}
NAMED |= {f"{SOURCE}.{name}" for name in (*READ, *OF_SOURCE)}
NAMED |= {f"{OF_ALL}.algo.type", f"{OF_ALL}.group_size", f"{SAMPLES}.sampling.temperature"}
NAMED |= {f"trainer.loss.{name}" for name in (*prime_rl.LOSS_OPTIONS, *(one.key for one in PRIME_RL.options))}
KNOWN = {*TABLES, LOSS}  # names at a file's top
TABLES_READ = ("trainer", "trainer.loss", "trainer.loss.kwargs", OF_ALL, f"{OF_ALL}.algo", SAMPLES)

# --- From TOML -----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A training environment, with the options of `READ` that act there, and its own table."""

    name: str
    options: dict[str, Any]
    table: dict[str, Any]
    algorithm: dict[str, Any]


def read(table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, Findings]:
    """What PRIME-RL trains with this TOML: an rl.toml, or the own file of a trainer."""
    whole, found = as_rl(dict(table)), Findings()
    with found.collected():
        upstream.require(version)
        check_tables(whole, *TABLES_READ)
        objective, more = _read(whole)
        found += more
        return objective, found
    raise error_of(one if whole == table else one.without("trainer") for one in found)


def unread(table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """The keys of a config that are not looked at."""
    whole = as_rl(dict(table))
    above = "" if whole == table else "trainer."
    return (key.removeprefix(above) for key in not_looked_at(whole, NAMED))


def release(version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
    """The release whose options are read and written."""
    return f"PRIME-RL {prime_rl.OLDEST} to {prime_rl.NEWEST_TESTED}, commit {prime_rl.COMMIT}"


def _read(config: Mapping[str, Any]) -> tuple[Objective, Iterable[Finding]]:
    """What PRIME-RL trains with these options of an rl.toml."""
    every = list(sources(config))
    routed = [one for one in every if one.options["algo.type"] in ROUTED]
    with_rewards = [one for one in every if one not in routed]
    remarks = [_routed(one) for one in routed if with_rewards]
    first = (with_rewards or every)[0].options
    for key, (parameter, above) in NUMBERS.items():
        for one in every:
            place = above if at(one.table, key) is None else SOURCE
            parameter.check(f"{place}.{key}", one.options[key], READ[key])
    common: dict[str, Any] = {"temperature": first["sampling.temperature"]}
    if OF_ALL in config:  # a trainer's own file says nothing of it
        common["group_size"] = first["group_size"]
    remarks += [*_differing(with_rewards), *_not_carried(config, every)]
    if not with_rewards:
        why = f"{' and '.join(map(_routed, routed))}, without rewards"
        return objectives.without_policy(why, remarks=tuple(remarks), has_terms=False, **common), ()
    if (kind := first["algo.type"]) in ADVANTAGES:
        common["advantage"] = choose("advantage", ADVANTAGES[kind])
    else:
        remarks.append(f"algo.type = {kind!r}")
    asked, found = parse(kwargs_of(table_at(config, "trainer.loss")))
    found.refuse()
    assert asked is not None
    policy, options = asked.choice, asked.config
    given: objectives.Behaviour = "policy itself" if options.old_policy == "current" else "rollout engine"
    old, rollout = objectives.behaviours(policy, given, "rollout engine")
    if options.hint_weight:
        remarks.append("the hint's teacher: it is whatever computed the reference log-probabilities")
    if options.replay_weight:
        remarks.append("the replay's loss: its coefficients are computed where the pairs are stamped")
    objective = Objective(
        policy=policy,
        mode=MODE,
        old=old,
        rollout=rollout,
        correction=asked.correction,
        channels=objectives.channels_of(options),
        denominators={"hint_weight": MODE, "replay_weight": "all tokens of the batch"},
        remarks=tuple(remarks),
        **common,
    )
    return objective, found


def sources(config: Mapping[str, Any]) -> Iterator[Source]:
    """The training environments; if none is listed, one with the orchestrator's own options."""
    of_all, samples = table_at(config, OF_ALL), table_at(config, SAMPLES)
    listed = samples.get("source")
    for number, own in enumerate(listed if listed and isinstance(listed, list) else [{}], 1):
        algorithm = table_at(own, "algo") or table_at(of_all, "algo")
        sampling = table_at(samples, "sampling") | table_at(own, "sampling")
        size = own.get("group_size", of_all.get("group_size"))
        given = (algorithm.get("type"), size, sampling.get("temperature"))
        options = {key: READ[key] if x is None else x for key, x in zip(READ, given, strict=True)}
        yield Source(str(own.get("name") or f"source {number}"), options, own, algorithm)


def _routed(source: Source) -> str:
    """A source that a loss of PRIME-RL's own trains, and not [trainer.loss]."""
    kind = source.options["algo.type"]
    return f"algo.type = {kind!r} of {source.name}, which trains with PRIME-RL's own {ROUTED[kind]}"


def _differing(listed: Sequence[Source]) -> Iterator[str]:
    """Yield the options that are not the same for all sources, and what "echo" trains besides the loss."""
    for key in READ:
        if len({ADVANTAGES.get(str(x), x) for x in (one.options[key] for one in listed)}) > 1:
            shown = ", ".join(f"{one.options[key]} for {one.name}" for one in listed)
            yield f"{key} differs by source ({shown}), and the value of the first source is written"
    for one in listed:
        path = table_at(one.algorithm, "filter").get("import_path")
        if one.options["algo.type"] == "echo" and path != OUR_FILTER:
            yield f"algo.type = 'echo' of {one.name}, which trains a cross-entropy on observation tokens too"


def _not_carried(config: Mapping[str, Any], every: Sequence[Source]) -> Iterator[str]:
    """Yield what is not carried over, and the filters that drop rollouts whatever their advantage is."""
    yield from not_carried(config, NOT_CARRIED)
    yield from dict.fromkeys(
        f"{SOURCE}.{text}" for one in every for text in not_carried(one.table, OF_SOURCE)
    )
    for key in FILTERS:
        for one in at(config, key) or ():
            if one.get("enforce") is True and one.get("type") != FILTERED_BY_ADVANTAGE:
                yield f"{key}: {one.get('type')!r} with enforce = true"


def kwargs_of(loss: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs of `loss_fn` for this `[trainer.loss]`, where it is PRIME-RL's own too."""
    kind = loss.get("type", DEFAULT_LOSS)
    if kind == "custom":
        if loss.get("import_path") != FUNCTION:
            problem = f"{loss.get('import_path')!r} is not our function"
            raise ConfigError("trainer.loss.import_path", problem, f"set {FUNCTION}, or PRIME-RL's own type")
        return dict(loss.get("kwargs") or {})
    own = next((one for one in prime_rl.LOSSES if one.options["type"] == kind), None)
    if own is None:
        known = (one.options["type"] for one in prime_rl.LOSSES)
        raise unknown("trainer.loss.type", str(kind), (*known, "custom"), noun="loss")
    return {"policy": own.row, "policy_params": params_of(own, loss)}


def params_of(own: NamedLoss, table: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, other than the defaults, that `[trainer.loss]` sets of a loss of PRIME-RL's own."""
    choice, found = find_one(own.row, "policy"), dict[str, Any]()
    for option in own.own:
        for name, x in option.values(choice.loss, table.get(option.key, option.default)).items():
            choice.loss.parameters[name].check(f"trainer.loss.{option.key}", x, option.default)
            found |= {name: x} if x != choice.value(name) else {}
    return found


# --- To TOML -------------------------------------------------------------------------------------------


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """A TOML of PRIME-RL for this objective, as far as it can run it."""
    upstream.require(version)
    policy = objective.policy
    kwargs = objectives.named_policy(objective)
    if "old_logprobs" in policy.loss.needs:
        kwargs["old_policy"] = "current" if objective.old == "policy itself" else "rollout"
    has_ratio = not {"old_logprobs", "rollout_logprobs"}.isdisjoint(policy.loss.needs)
    if objective.correction is not None and not has_ratio:
        kwargs |= named("rollout_correction", objective.correction)
    kwargs |= {name: value for name, value in objective.channels.items() if name not in PRIME_RL.unavailable}
    loss = {"type": "custom", "import_path": FUNCTION, "kwargs": kwargs}
    orchestrator: dict[str, Any] = {}
    advantage = objective.advantage.loss.name if objective.advantage is not None else ""
    kind = ALGORITHMS.get(advantage, DEFAULT_ALGORITHM)
    if kind != DEFAULT_ALGORITHM:
        orchestrator["algo"] = {"type": kind}
    if objective.group_size is not None:
        orchestrator["group_size"] = objective.group_size
    if objective.temperature != 1.0:
        orchestrator["train"] = {"sampling": {"temperature": objective.temperature}}
    return {"trainer": {"loss": loss}} | ({"orchestrator": orchestrator} if orchestrator else {})


def render(table: Mapping[str, Any]) -> str:
    """The table as TOML, a header for each table in it and one line for each value."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {k: v for k, v in table.items() if not isinstance(v, Mapping) or k.endswith("_params")}
    if path and values:
        yield ""
        yield f"[{'.'.join(path)}]"
    yield from (f"{name} = {inline(value)}" for name, value in values.items())
    for name, value in table.items():
        if name not in values:
            yield from _lines(value, (*path, name))


def inline(value: Any) -> str:
    """A value as TOML writes it in one line. It has no null: an option that is None is at its default."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {inline(x)}' for key, x in value.items() if x is not None)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value, default=str) if isinstance(value, bool | str) else repr(value)
