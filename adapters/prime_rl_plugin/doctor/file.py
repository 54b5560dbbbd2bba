"""The user's TOML as PRIME-RL reads it."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.diagnosis import Finding
from composer_plugins.errors import ConfigError, did_you_mean, near

NOT_LISTED = "orchestrator"  # the key of a source that stands for those that the file does not list


class Source(NamedTuple):
    """A training environment and the algorithm of its samples."""

    key: str
    algorithm: str
    algorithm_key: str
    group_size: Any  # completions per prompt; None if it is not set
    group_size_key: str
    filter: dict[str, Any]  # the algorithm's, with import_path and kwargs
    filter_key: str
    plugins: dict[str, str]  # what verifiers imports, by the key that names it

    @property
    def filter_path(self) -> str:
        """The import path of the filter, which only the algorithm "echo" has; "" if there is none."""
        path = self.filter.get("import_path") if self.algorithm == upstream.ECHO_ALGORITHM else None
        return path if isinstance(path, str) else ""


class Run(NamedTuple):
    """The merged file. A file for `rl` and a trainer's own differ in where the loss table is."""

    config: dict[str, Any]
    loss_key: str
    loss: dict[str, Any] | None
    sources: list[Source]
    is_for_rl: bool  # and not a trainer's own

    @property
    def path(self) -> str:
        """The import path, or "" if there is none."""
        path = (self.loss or {}).get("import_path")
        return path if isinstance(path, str) else ""


def read(files: Sequence[Path]) -> Run:
    """Read and merge the files. ConfigError if one cannot be read, or none is PRIME-RL's."""
    config: dict[str, Any] = {}
    for file in files:
        try:
            config = merged(config, tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
            raise ConfigError(str(file), problem, "name a file that exists") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(file), f"is not TOML: {error}", "correct it") from None
    of_rl = [*upstream.RL_TABLES, *([upstream.INFERENCE_TABLE] if "data" not in config else [])]
    of_rl += upstream.DEPLOYMENT_TABLES if "loss" in config else []
    is_for_rl = any(name in config for name in of_rl)
    if not (is_for_rl or "loss" in config or "model" in config or list(misspelt(config))):
        problem = "is not a config of PRIME-RL: it has none of its tables"
        remedy = "give one with [trainer], [orchestrator] or [inference] (rl.toml), or with [loss] or [model]"
        raise ConfigError(", ".join(map(str, files)), problem, remedy)
    for name in upstream.RL_TABLES:
        if not isinstance(config.get(name, {}), dict):
            raise ConfigError(name, f"it is {config[name]!r}", f"make it a table: [{name}]")
    loss = (table(config, "trainer") if is_for_rl else config).get("loss")
    key = "trainer.loss" if is_for_rl else "loss"
    if loss is not None and not isinstance(loss, dict):
        remedy = f"make it a table: [{key}] with type, import_path and kwargs"
        raise ConfigError(key, f"it is {loss!r}", remedy)
    return Run(config, key, loss, list(sources(config)), is_for_rl)


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


def misspelt(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Names that are like one of `upstream.NAMES` which the file does not have.

    It is a guess, where PRIME-RL's own classes cannot be asked: they have many more names.
    """
    for holder, known in upstream.NAMES.items():
        given = table(config, *filter(None, holder.split(".")))
        absent = [name for name in known if name not in given]
        for name in given:
            if name not in {*known, *upstream.SIMILAR_NAMES} and (nearest := near(name, absent)):
                key = f"{holder}.{name}".lstrip(".")
                problem = "PRIME-RL is not known to have a table or an option of this name"
                yield Finding("warning", key, problem, did_you_mean(nearest))


def algorithm(holder: dict[str, Any]) -> str:
    """The algorithm that this table names, or ""; 0.5 and 0.6 have a table `advantage` in its place."""
    given = table(holder, "algo") or holder.get("advantage", "")
    return str(given.get("type", upstream.DEFAULT_ALGORITHM) if isinstance(given, dict) else given)


def group_size(holders: Mapping[str, Any]) -> tuple[Any, str]:
    """The number of completions per prompt, and its key; of these tables the last one that sets it wins."""
    for at, holder in reversed([*holders.items()]):
        for name in upstream.GROUP_SIZES:
            if name in table(holder):
                return holder[name], f"{at}.{name}"
    return None, ""


def sources(config: dict[str, Any]) -> Iterator[Source]:
    """The training environments of an rl.toml, with the options that they take from the orchestrator.

    If the file lists none, one with the orchestrator's own options stands for them.
    """
    orchestrator = table(config, "orchestrator")
    train = table(orchestrator, "train")
    # v0.8 has [[train.source]]; before, [[train.env]] and [[env]].
    tables = {
        "orchestrator.train.source": train.get("source"),
        "orchestrator.train.env": train.get("env"),
        "orchestrator.env": orchestrator.get("env"),
    }
    listed = [(key, one) for key, every in tables.items() if isinstance(every, list) for one in every]
    for key, one in listed or [(NOT_LISTED, orchestrator)]:
        own, env = algorithm(table(one)), table(one, "env")
        algo = table(one, "algo") or table(orchestrator, "algo")
        ids = {f"{key}.env.taskset.id": table(env, "taskset").get("id"), f"{key}.env.id": env.get("id")}
        yield Source(
            key,
            own or algorithm(orchestrator) or upstream.DEFAULT_ALGORITHM,
            f"{key}.algo.type" if own else "orchestrator.algo.type",
            *group_size({"orchestrator": orchestrator, key: one}),
            table(algo, "filter"),
            f"{key if table(one, 'algo') else 'orchestrator'}.algo.filter",
            {at: name for at, name in ids.items() if isinstance(name, str) and name},
        )
