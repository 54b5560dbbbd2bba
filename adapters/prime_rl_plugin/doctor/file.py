"""The user's TOML as PRIME-RL reads it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_plugin import keys
from composer_plugins.adapters.prime_rl_plugin.surface import MODULE
from composer_plugins.config import at
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.objective.files import replaced, table_of
from composer_plugins.objective.keys import not_understood

ECHO_FILTER = f"{MODULE}.stored_stamps.echo_filter"  # which selects nothing for echo's cross-entropy
WITH_ADVANTAGES = 'set type = "grpo", or another algorithm that assigns advantages'
NOT_LISTED = "orchestrator"  # the key of a source that stands for those that the file does not list


class Algorithm(NamedTuple):
    """The algorithm of a source, which computes its advantages."""

    name: str
    key: str  # of the name
    options: dict[str, Any]  # its table, of the source or of the orchestrator
    options_key: str

    @property
    def filter(self) -> dict[str, Any]:
        """Its filter, with import_path and kwargs."""
        return table(self.options, "filter")

    @property
    def filter_path(self) -> str:
        """The import path of the filter, which only the algorithm "echo" has; "" if there is none."""
        path = self.filter.get("import_path") if self.name == keys.ECHO_ALGORITHM else None
        return path if isinstance(path, str) else ""

    @property
    def echo(self) -> str:
        """What "echo" trains beside the policy loss, in words; "" where it trains nothing else."""
        if self.name != keys.ECHO_ALGORITHM or self.filter_path == ECHO_FILTER:
            return ""
        roles = self.options.get("roles", keys.ECHO_ROLES)
        roles = roles if isinstance(roles, dict) else {}
        weights = {role: table(one).get("alpha", keys.ECHO_ALPHA) for role, one in roles.items()}
        shown = ", ".join(f"{role} {alpha}" for role, alpha in weights.items())
        only = f", of those that {self.filter_path} selects" if self.filter_path else ""
        return f"a cross-entropy on observation tokens, weighted by the alpha of their role ({shown}){only}"


class Setting(NamedTuple):
    """The value of an option, and the key that sets it; None and "" if none does."""

    value: Any
    key: str


class Source(NamedTuple):
    """A training environment, and what PRIME-RL does with its samples."""

    key: str
    name: str  # "" if neither the source nor its environment has one
    table: dict[str, Any]  # its own options; the orchestrator's, where no source is listed
    algo: Algorithm
    group_size: Setting  # completions per prompt
    temperature: Setting
    samplings: Mapping[str, Any]  # the tables of its sampling by key, of which the last one wins
    plugins: dict[str, str]  # what verifiers imports, by the key that names it


class Routed(NamedTuple):
    """Samples that PRIME-RL trains with a loss of its own, and not with [trainer.loss]."""

    key: str
    name: str  # of the algorithm
    own: str  # the loss


class Run(NamedTuple):
    """The merged file. The files of the parts have at their top what an rl.toml has in tables."""

    config: dict[str, Any]
    loss_key: str
    loss: dict[str, Any] | None
    sources: list[Source]
    kind: str  # a key of keys.FILE_NAMES

    @property
    def is_for_rl(self) -> bool:
        """Whether it is a file for `rl`."""
        return self.kind == keys.RL

    @property
    def path(self) -> str:
        """The import path, or "" if there is none."""
        path = (self.loss or {}).get("import_path")
        return path if isinstance(path, str) else ""


def read(files: Sequence[Path], overrides: Sequence[str] = ()) -> Run:
    """Read and merge the files. ConfigError if one cannot be read, or none is PRIME-RL's."""
    config = merged_config(files, overrides)
    kind = kind_of(config)
    tops = {*keys.RL_TABLES, *keys.OWN_FILES[keys.TRAINER], "model"}
    if not any(name in tops for name in config) and kind == keys.TRAINER:
        problem = "is not a config of PRIME-RL: it has none of its tables"
        remedy = "give one with [trainer], [orchestrator] or [inference] (rl.toml), or with [loss] or [model]"
        raise ConfigError(", ".join(map(str, files)), problem, remedy)
    for name in keys.RL_TABLES:
        if not isinstance(config.get(name, {}), dict):
            raise ConfigError(name, f"it is {config[name]!r}", f"make it a table: [{name}]")
    loss = table(as_rl(config, kind), "trainer").get("loss")
    key = "loss" if kind == keys.TRAINER else "trainer.loss"
    if loss is not None and not isinstance(loss, dict):
        remedy = f"make it a table: [{key}] with type, import_path and kwargs"
        raise ConfigError(key, f"it is {loss!r}", remedy)
    return Run(config, key, loss, list(sources(as_rl(config, kind))), kind)


def kind_of(config: Mapping[str, Any]) -> str:
    """Which kind of file this is: a key of keys.FILE_NAMES. One without a mark is a trainer's own."""
    of_rl = [*keys.RL_TABLES, *([keys.INFERENCE_TABLE] if "data" not in config else [])]
    alone = bool(config) and config.keys() <= {*keys.DEPLOYMENT_TABLES}
    of_rl += keys.DEPLOYMENT_TABLES if "loss" in config or alone else []
    if any(name in config for name in of_rl):
        return keys.RL
    if "loss" not in config and table(config, "data").keys() - keys.FAKE_DATA:
        return keys.SFT
    marks = {kind: sum(one in config for one in names) for kind, names in keys.OWN_FILES.items()}
    return max(marks, key=lambda kind: marks[kind])


def as_rl(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The options of a file below the tables that they have in an rl.toml."""
    return dict(config) if kind == keys.RL else {kind: dict(config)}


def merged_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The config of a command line of PRIME-RL: its files from left to right, then its options.

    An option is "a.b=c", or "a.b=@FILE" for a file that stands in a table. "None" is null, as in its files.
    """
    nested = [one.partition("=@") for one in overrides if "=@" in one]
    tables = [table_of(file) for file in files]
    for key, _, name in nested:
        inner: dict[str, Any] = table_of(Path(name))
        for part in reversed(key.split(".")):
            inner = {part: inner}
        tables.append(inner)
    found = replaced(together(tables), [one for one in overrides if "=@" not in one])
    return {key: without_none(value, key) for key, value in found.items()}


def without_none(value: Any, name: str = "") -> Any:
    """The value with null for the text "None", but for the kwargs of a function, which get the text."""
    if isinstance(value, Mapping) and name != "kwargs":
        return {key: without_none(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [without_none(one) if isinstance(one, Mapping) else one for one in value]
    return None if value == "None" else value


def together(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several files as one: the trainer's own and the orchestrator's, or files that add to one another."""
    own = [kind_of(one) for one in tables]
    if keys.RL not in own and len(set(own)) > 1:
        tables = [as_rl(one, kind) for one, kind in zip(tables, own, strict=True)]
    return reduce(merged, tables, {})


def merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two files merged as PRIME-RL does: tables key by key, where the later file wins, lists as a whole."""
    out = dict(base)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def table(config: Any, *keys: str) -> dict[str, Any]:
    """The table under these keys; an empty one where there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def unread(config: Mapping[str, Any], *checked: str) -> Iterator[str]:
    """The keys of an rl.toml that are not understood. Those of `checked` are looked at elsewhere."""
    algorithms = {one.algo.key for one in sources(config)}
    return not_understood(config, keys.KNOWN_KEYS | algorithms | {*checked})


def algorithm(holder: Mapping[str, Any], above: str) -> Algorithm | None:
    """The algorithm that this table names."""
    given, key = holder.get("algo"), f"{above}.algo"
    if "algo" in holder and above == NOT_LISTED:  # null at a source is the orchestrator's, and here is none
        given = "None" if given is None else given
    if given and isinstance(given, dict):
        return Algorithm(str(given.get("type", keys.DEFAULT_ALGORITHM)), f"{key}.type", given, key)
    return Algorithm(str(given), key, {}, key) if given else None


def unknown_algorithms(listed: Iterable[Source]) -> Iterator[ConfigError]:
    """Yield the error for each algorithm that no release of PRIME-RL has."""
    wrong = {one.algo.key: one.algo.name for one in listed if one.algo.name not in keys.ALGORITHM_TYPES}
    known = keys.ALGORITHM_TYPES - {"None"}
    return (unknown(key, name, known, noun="algorithm") for key, name in wrong.items())


def last_set(holders: Mapping[str, Any], name: str) -> Setting:
    """The option of this name; the last table that sets it wins."""
    for above, holder in reversed([*holders.items()]):
        if name in table(holder):
            return Setting(holder[name], f"{above}.{name}")
    return Setting(None, "")


def sources(config: Mapping[str, Any]) -> Iterator[Source]:
    """The training environments of an rl.toml, with the options that they take from the orchestrator.

    If the file lists none, one with the orchestrator's own options stands for them.
    """
    orchestrator = table(config, "orchestrator")
    algo_key = f"{NOT_LISTED}.algo"
    default = Algorithm(keys.DEFAULT_ALGORITHM, f"{algo_key}.type", {}, algo_key)
    common = algorithm(orchestrator, NOT_LISTED) or default
    shared = {key: at(config, key) for key in keys.SAMPLINGS}
    tables = {key: at(config, key) for key in keys.SOURCES}
    listed = [(key, one) for key, every in tables.items() if isinstance(every, list) for one in every]
    for key, one in listed or [(NOT_LISTED, orchestrator)]:
        own, env = table(one), table(one, "env")
        ids = {f"{key}.env.taskset.id": table(env, "taskset").get("id"), f"{key}.env.id": env.get("id")}
        plugins = {where: name for where, name in ids.items() if isinstance(name, str) and name}
        samplings = {**shared, f"{key}.sampling": own.get("sampling")}
        yield Source(
            key=key,
            name=str(own.get("name") or own.get("id") or next(iter(plugins.values()), "")),
            table=own,
            algo=algorithm(own, key) or common,
            group_size=last_set({NOT_LISTED: orchestrator, key: own}, keys.GROUP_SIZE),
            temperature=last_set(samplings, "temperature"),
            samplings=samplings,
            plugins=plugins,
        )


def routed(listed: Sequence[Source]) -> tuple[list[Routed], bool]:
    """The samples of these sources that no policy loss trains, and whether all of them are such samples."""
    own = keys.ROUTED
    found = [
        Routed(one.algo.key, one.algo.name, own[one.algo.name]) for one in listed if one.algo.name in own
    ]
    return list(dict.fromkeys(found)), all(one.algo.name in own for one in listed)
