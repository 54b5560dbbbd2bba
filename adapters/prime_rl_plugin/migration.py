"""PRIME-RL's side of `composer-plugins migrate`: its TOML as an Objective, and an Objective as TOML."""

from collections.abc import Mapping
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import native, upstream
from composer_plugins.adapters.prime_rl_plugin.config import (
    DECIDED_ELSEWHERE,
    DEFAULTS,
    MODULE,
    PRESETS,
    findings,
    parse,
)
from composer_plugins.adapters.prime_rl_plugin.doctor.file import sources
from composer_plugins.adapters.prime_rl_plugin.doctor.file import table as at
from composer_plugins.adapters.prime_rl_plugin.native import inline
from composer_plugins.catalogue import choose
from composer_plugins.errors import ConfigError, raise_all
from composer_plugins.migration import (
    COUNT,
    POSITIVE,
    Behaviour,
    Objective,
    behaviours,
    channels_of,
    check_tables,
    named,
)
from composer_plugins.plugins import losses

ADVANTAGES = {"grpo": "dr_grpo@prime-rl", "echo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}
ALGORITHMS = {row.partition("@")[0]: kind for kind, row in reversed(ADVANTAGES.items())}
KNOWN = {"trainer", "orchestrator", "inference", "loss", "model"}  # tables at the top of a file
TABLES = ["trainer", "trainer.loss", "loss", "trainer.loss.kwargs", "loss.kwargs", "orchestrator"]
TABLES += [f"orchestrator.{name}" for name in ("algo", "train", "sampling", "train.sampling")]
READ = {"algo", "group_size", "rollouts_per_example", "sampling", "train", "advantage"}  # of [orchestrator]


def read(table: Mapping[str, Any], version: str | None = None) -> Objective:
    """What PRIME-RL trains with this TOML, an rl.toml or a trainer's own."""
    check_tables(table, *TABLES)
    remarks: list[str] = []
    kwargs, function = _kwargs(table, version, remarks)
    channels = parse(kwargs, function)
    policy, config = channels.policy, channels.config
    given: Behaviour = "policy itself" if config.old_policy == "current" else "rollout engine"
    old, rollout = behaviours(policy, given, "rollout engine")
    orchestrator = at(table, "orchestrator")
    algorithm = at(orchestrator, "algo")
    sampling = at(orchestrator, "sampling") | at(orchestrator, "train", "sampling")
    kind = str(algorithm.get("type", upstream.DEFAULT_ALGORITHM))
    advantage = choose(losses(), "advantage", ADVANTAGES[kind]) if kind in ADVANTAGES else None
    if advantage is None:
        remarks.append(f"orchestrator.algo.type = {kind!r}")
    if algorithm.get("length_penalty") is not None:
        remarks.append("orchestrator.algo.length_penalty")
    if config.hint_weight:
        remarks.append("the hint's teacher: it is whatever computed the reference log-probabilities")
    if config.replay_weight:
        remarks.append("the replay's loss: its coefficients are computed where the pairs are stamped")
    generation = upstream.generation_of(version)
    if generation.denominator != upstream.GLOBAL_TOKENS:
        remarks.append(f"PRIME-RL {generation.since} divides by {generation.denominator}")
    own = [one for one in sources(dict(table)) if one.algorithm_key != "orchestrator.algo.type"]
    remarks += [f"{one.algorithm_key} = {one.algorithm!r}" for one in own]
    if "advantage" in orchestrator:
        remarks.append(f"orchestrator.advantage = {orchestrator['advantage']!r}")
    size = orchestrator.get("group_size", orchestrator.get("rollouts_per_example"))
    COUNT.check("orchestrator.group_size", size, None)
    POSITIVE.check("orchestrator.sampling.temperature", sampling.get("temperature"), None)
    return Objective(
        policy=policy,
        mode=upstream.MODE,
        old=old,
        rollout=rollout,
        advantage=advantage,
        group_size=size,
        correction=channels.rollout_correction,
        temperature=sampling.get("temperature") or 1.0,
        channels=channels_of(config),
        denominators={"hint_weight": upstream.MODE, "replay_weight": "all tokens of the batch"},
        remarks=tuple(remarks),
        to_correct=tuple(str(one) for one in findings(channels, generation) if one.severity == "error"),
        unread=tuple(f"orchestrator.{name}" for name in orchestrator if name not in READ),
    )


def write(objective: Objective, version: str | None = None) -> dict[str, Any]:
    """A TOML of PRIME-RL for this objective, as far as it can run it."""
    policy = objective.policy
    kwargs = named("policy", policy)
    if "old_logprobs" in policy.loss.needs:
        kwargs["old_policy"] = "current" if objective.old == "policy itself" else "rollout"
    has_ratio = not {"old_logprobs", "rollout_logprobs"}.isdisjoint(policy.loss.needs)
    if objective.correction is not None and not has_ratio:
        kwargs |= named("rollout_correction", objective.correction)
    kwargs |= {name: value for name, value in objective.channels.items() if name not in DECIDED_ELSEWHERE}
    loss = {"type": "custom", "import_path": f"{MODULE}.loss_fn", "kwargs": kwargs}
    orchestrator: dict[str, Any] = {}
    generation = upstream.generation_of(version)
    before_0_6, before_0_7 = (generation in upstream.GENERATIONS[:n] for n in (2, 3))
    advantage = objective.advantage.loss.name if objective.advantage is not None else ""
    kind = ALGORITHMS.get(advantage, upstream.DEFAULT_ALGORITHM)
    if kind != upstream.DEFAULT_ALGORITHM and not before_0_7:  # which had no table algo
        orchestrator["algo"] = {"type": kind}
    if objective.group_size is not None:
        orchestrator["rollouts_per_example" if before_0_6 else "group_size"] = objective.group_size
    if objective.temperature != 1.0:
        sampling = {"sampling": {"temperature": objective.temperature}}
        orchestrator |= sampling if before_0_6 else {"train": sampling}
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


def _kwargs(table: Mapping[str, Any], version: str | None, remarks: list[str]) -> tuple[dict[str, Any], str]:
    """The kwargs and the function of ours that this file's loss is, where it is PRIME-RL's own too."""
    key = "trainer.loss" if "trainer" in table or "orchestrator" in table else "loss"
    loss = at(table, *key.split("."))
    generation = upstream.generation_of(version)
    kind = loss.get("type", native.default_kind(generation))
    if kind == "custom":
        function = str(loss.get("import_path", "")).removeprefix(f"{MODULE}.")
        if function not in ("loss_fn", *PRESETS):
            problem = f"{loss.get('import_path')!r} is not a function of this package"
            raise ConfigError(f"{key}.import_path", problem, f"name one of {MODULE}, or PRIME-RL's own type")
        return dict(loss.get("kwargs") or {}), function
    own = native.find(kind, generation)
    if own is None:
        known = ", ".join(native.KINDS)
        raise ConfigError(f"{key}.type", f"{kind!r} is not a loss of PRIME-RL", f"set one of {known}, custom")
    raise_all(native.wrong_options(own, loss, key))
    kwargs, lost = native.kwargs_of(own, {name: value for name, value in loss.items() if name != "type"})
    remarks += lost
    return {"policy": DEFAULTS["policy"]} | kwargs, "loss_fn"
