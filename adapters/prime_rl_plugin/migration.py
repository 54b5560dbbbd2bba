"""PRIME-RL's side of `composer-plugins migrate`: its TOML as an Objective, and an Objective as TOML."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import keys, own_losses, upstream
from composer_plugins.adapters.prime_rl_plugin.doctor import file
from composer_plugins.adapters.prime_rl_plugin.doctor.file import (
    Routed,
    Source,
    as_rl,
    kind_of,
    merged_config,
)
from composer_plugins.adapters.prime_rl_plugin.doctor.file import table as at
from composer_plugins.adapters.prime_rl_plugin.own_losses import inline
from composer_plugins.adapters.prime_rl_plugin.surface import DEFAULTS, MODULE, PRESETS, findings, parse
from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding, Findings, enforce, error_of
from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.contract import NOTHING, NamedLoss
from composer_plugins.frameworks.prime_rl import DECIDED_ELSEWHERE
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import Parameter
from composer_plugins.objective.keys import COUNT, POSITIVE, check_tables, not_carried
from composer_plugins.objective.objective import (
    Behaviour,
    Objective,
    behaviours,
    channels_of,
    named,
    named_policy,
    without_policy,
)

__all__ = ["merged_config", "read", "release", "render", "write"]
KNOWN = {*keys.FILE_NAMES, "model"}.union(*keys.OWN_FILES.values())  # names at a file's top
TABLES = ["trainer", "trainer.loss", "trainer.loss.kwargs", "orchestrator"]
TABLES += [f"orchestrator.{name}" for name in ("algo", "train", "train.sampling")]
LOSS = "trainer.loss"
# Options that each source may set, with the values where nothing sets them.
PER_SOURCE: dict[str, tuple[Parameter, float]] = {
    "group_size": (COUNT, keys.DEFAULT_GROUP_SIZE),
    "temperature": (POSITIVE, 1.0),
}


def read(table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, Findings]:
    """What PRIME-RL trains with this TOML: an rl.toml, or the own file of a trainer or an orchestrator."""
    kind = kind_of(table)
    above = _above(kind)
    if kind in keys.WITHOUT_LOSS:
        problem = f"this is {keys.FILE_NAMES[kind]}, which has no policy loss"
        raise ConfigError(
            "FILE", problem, "give the rl.toml, or the files of the trainer and the orchestrator"
        )
    check_tables(table, *(path.removeprefix(f"{above}.") for path in TABLES))
    found = Findings()
    with found.collected():
        upstream.generation_of(version)  # a ConfigError for one that is too old
        objective, more = _read(as_rl(table, kind), kind)
        remarks = tuple(one.removeprefix(f"{above}.") for one in objective.remarks)
        why = objective.no_policy.removeprefix(f"{above}.")
        found += [one.without(above) for one in more]
        return replace(objective, remarks=remarks, no_policy=why), found
    raise error_of(one.without(above) for one in found)


def _above(kind: str) -> str:
    """The table of an rl.toml that has the keys at the top of such a file: "trainer"; "" for an rl.toml."""
    return "" if kind == keys.RL else kind


def unread(table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
    """The keys of a config that are not understood."""
    kind = kind_of(table)
    whole, above = as_rl(table, kind), _above(kind)
    # own_losses.wrong_options looks at each option of the loss
    found = file.unread(whole, *([LOSS] if _own(whole) is not None else []))
    return (key.removeprefix(f"{above}.") for key in found)


def release(version: str | None = None, table: Mapping[str, Any] = NOTHING) -> str:
    """The release whose options are read and written."""
    generation = upstream.generation_of(version)
    end = f" to {prime_rl.NEWEST_TESTED}, commit 559b447" if generation is prime_rl.TESTED else ""
    how = "no --version is given" if version is None else f"--version {version}"
    return f"PRIME-RL {generation.since}{end} ({how})"


def _own(table: Mapping[str, Any]) -> NamedLoss | None:
    """PRIME-RL's own loss that is named, or that it trains with by default; None where it is another one."""
    return own_losses.find(at(table, "trainer", "loss").get("type", own_losses.DEFAULT_KIND))


def _read(table: Mapping[str, Any], kind: str) -> tuple[Objective, Iterable[Finding]]:
    """What PRIME-RL trains with these options of an rl.toml; a file of `kind` has one of its tables."""
    loss, listed = at(table, "trainer", "loss"), list(file.sources(table))
    for error in file.unknown_algorithms(listed):
        raise error
    own = _own(table)
    routed, is_routed = file.routed(listed)
    with_rewards = [one for one in listed if one.algo.name not in keys.ROUTED] or listed
    remarks = [f"{one.key} = {one.name!r}, which trains with PRIME-RL's own {one.own}" for one in routed]
    remarks = [] if is_routed else remarks
    advantage = None if is_routed else _advantage(with_rewards, remarks)
    remarks += [*_of_sources(table, listed), *not_carried(table, keys.NOT_CARRIED), *_filters(table)]
    size, temperature = (_per_source(field, with_rewards, remarks) for field in PER_SOURCE)
    if size is None and "orchestrator" in table:  # a trainer's own file says nothing of it
        size = keys.DEFAULT_GROUP_SIZE
    common: dict[str, Any] = {
        "advantage": advantage,
        "group_size": size,
        "temperature": temperature or 1.0,
    }
    if why := _no_policy(kind, routed if is_routed else []):
        has_rewards = kind == keys.ORCHESTRATOR and not is_routed
        common |= {} if has_rewards else {"advantage": None}
        return without_policy(why, remarks=tuple(remarks), has_terms=has_rewards, **common), ()
    kwargs, function = _kwargs(loss, own, remarks)
    channels = parse(kwargs, function)
    policy, config = channels.policy, channels.config
    given: Behaviour = "policy itself" if config.old_policy == "current" else "rollout engine"
    old, rollout = behaviours(policy, given, "rollout engine")
    if config.hint_weight:
        remarks.append("the hint's teacher: it is whatever computed the reference log-probabilities")
    if config.replay_weight:
        remarks.append("the replay's loss: its coefficients are computed where the pairs are stamped")
    objective = Objective(
        policy=policy,
        mode=prime_rl.MODE,
        old=old,
        rollout=rollout,
        correction=channels.rollout_correction,
        channels=channels_of(config),
        denominators={"hint_weight": prime_rl.MODE, "replay_weight": "all tokens of the batch"},
        remarks=tuple(remarks),
        **common,
    )
    return objective, findings(channels)


def _no_policy(kind: str, routed: Sequence[Routed]) -> str:
    """Why no sample is trained with [trainer.loss] as a policy loss; "" if one is."""
    if routed:
        asked = " and ".join(f"{one.key} = {one.name!r}" for one in routed)
        own = " and ".join(dict.fromkeys(one.own for one in routed))
        return f"{asked} trains with PRIME-RL's own {own}, without rewards"
    if kind == keys.ORCHESTRATOR:
        return f"this is {keys.FILE_NAMES[kind]}, and the loss is in the trainer's file: give both files"
    return ""


def _advantage(listed: Sequence[Source], remarks: list[str]) -> Choice | None:
    """The advantages of these sources: where they differ, those of the orchestrator's algorithm."""
    inherited = [one for one in listed if not one.algo.key.startswith(f"{one.key}.")]
    kind = (inherited or listed)[0].algo.name
    rows = keys.ADVANTAGES
    for one in listed:
        if kind not in rows or rows.get(one.algo.name) != rows[kind]:
            remarks.append(f"{one.algo.key} = {one.algo.name!r}")
        if one.algo.echo:
            remarks.append(f"{one.algo.key} = {one.algo.name!r}: {one.algo.echo}")
    return choose("advantage", rows[kind]) if kind in rows else None


def _per_source(field: str, listed: Sequence[Source], remarks: list[str]) -> Any:
    """The value of an option that each source may set: the first one's where they differ, with a remark."""
    parameter, default = PER_SOURCE[field]
    given = {}
    for number, one in enumerate(listed, 1):
        value, key = getattr(one, field)
        parameter.check(key or f"orchestrator.{field}", value, None)
        given[number, one.name or f"source {number}"] = value
    first = next(iter(given.values()))
    if len({default if value is None else value for value in given.values()}) > 1:
        shown = ", ".join(f"{default if x is None else x} for {name}" for (_, name), x in given.items())
        remarks.append(f"{field} differs by source ({shown}), and that of the first one is written")
    return first


def _of_sources(table: Mapping[str, Any], listed: Sequence[Source]) -> Iterator[str]:
    """Yield what is not carried over of the algorithms, the sampling and the curricula."""
    found = []
    for one in listed:
        values = keys.ALGORITHM_NOT_CARRIED.items()
        found += [
            f"{one.algo.options_key}.{name}"
            for name, neutral in values
            if one.algo.options.get(name) not in neutral
        ]
        gates = not_carried(one.table, keys.SOURCE_NOT_CARRIED)
        found += [f"{one.key}.{text}" for text in gates]
    samplings = {key: at(table, *key.split(".")) for key in keys.SAMPLINGS}
    of_listed = [(f"{one.key}.sampling", at(one.table, "sampling")) for one in listed]
    for key, sampling in (*samplings.items(), *of_listed):
        found += [f"{key}.{text}" for text in not_carried(sampling, keys.SAMPLING_NOT_CARRIED)]
    yield from dict.fromkeys(found)


def _filters(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the filters that drop rollouts whatever their advantage is."""
    for key in keys.FILTERS:
        listed = at(table, "orchestrator").get(key.rpartition(".")[2])
        for one in listed if isinstance(listed, list) else ():
            kind = at(one).get("type")
            if at(one).get("enforce") is True and kind != keys.FILTERED_BY_ADVANTAGE:
                yield f"{key}: {kind!r} with enforce = true"


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """A TOML of PRIME-RL for this objective, as far as it can run it."""
    policy = objective.policy
    kwargs = named_policy(objective)
    if "old_logprobs" in policy.loss.needs:
        kwargs["old_policy"] = "current" if objective.old == "policy itself" else "rollout"
    has_ratio = not {"old_logprobs", "rollout_logprobs"}.isdisjoint(policy.loss.needs)
    if objective.correction is not None and not has_ratio:
        kwargs |= named("rollout_correction", objective.correction)
    kwargs |= {name: value for name, value in objective.channels.items() if name not in DECIDED_ELSEWHERE}
    loss = {"type": "custom", "import_path": f"{MODULE}.loss_fn", "kwargs": kwargs}
    orchestrator: dict[str, Any] = {}
    upstream.generation_of(version)  # a ConfigError for one that is too old
    advantage = objective.advantage.loss.name if objective.advantage is not None else ""
    kind = keys.ALGORITHMS.get(advantage, keys.DEFAULT_ALGORITHM)
    if kind != keys.DEFAULT_ALGORITHM:
        orchestrator["algo"] = {"type": kind}
    if objective.group_size is not None:
        orchestrator["group_size"] = objective.group_size
    if objective.temperature != 1.0:
        orchestrator["train"] = {"sampling": {"temperature": objective.temperature}}
    return {"trainer": {"loss": loss}} | ({"orchestrator": orchestrator} if orchestrator else {})


def render(table: Mapping[str, Any]) -> str:
    """The table as TOML, a header for each table in it and one line for each value."""
    lines = list(_lines(table, ()))
    return "\n".join(lines).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    values = {k: v for k, v in table.items() if not isinstance(v, Mapping) or k.endswith("_params")}
    if path and values:
        yield ""
        yield f"[{'.'.join(path)}]"
    # TOML has no null: an option that is None is at its default.
    yield from (f"{name} = {inline(_without_none(value))}" for name, value in values.items())
    for name, value in table.items():
        if name not in values:
            yield from _lines(value, (*path, name))


def _without_none(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def _kwargs(loss: Mapping[str, Any], own: NamedLoss | None, remarks: list[str]) -> tuple[dict[str, Any], str]:
    """The kwargs and the function of ours that this `[trainer.loss]` is, where it is PRIME-RL's own too."""
    kind = loss.get("type", own_losses.DEFAULT_KIND)
    if kind == "custom":
        function = str(loss.get("import_path", "")).removeprefix(f"{MODULE}.")
        if function not in ("loss_fn", *PRESETS):
            problem = f"{loss.get('import_path')!r} is not a function of this package"
            remedy = f"name one of {MODULE}, or PRIME-RL's own type"
            raise ConfigError(f"{LOSS}.import_path", problem, remedy)
        return dict(loss.get("kwargs") or {}), function
    if own is None:
        here = [one.options["type"] for one in prime_rl.LOSSES]
        problem = f"{kind!r} is not a loss of PRIME-RL"
        raise ConfigError(f"{LOSS}.type", problem, f"set one of {', '.join(here)}, custom")
    enforce(own_losses.wrong_options(own, loss, LOSS))
    kwargs, lost = own_losses.kwargs_of(own, {name: value for name, value in loss.items() if name != "type"})
    remarks += lost
    return {"policy": DEFAULTS["policy"]} | kwargs, "loss_fn"
