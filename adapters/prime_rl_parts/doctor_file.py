"""A user's TOML as PRIME-RL reads it, of which the doctor asks what the run will do."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError

DEFAULT_ALGORITHM = "grpo"


class Source(NamedTuple):
    """A training environment and the algorithm of its samples."""

    key: str
    algorithm: str
    algorithm_key: str
    filter: dict[str, Any]  # the algorithm's, with import_path and kwargs
    plugins: dict[str, str]  # what verifiers imports, by the key that names it


class Run(NamedTuple):
    """The file as it was read: both layouts have one loss table."""

    config: dict[str, Any]
    loss_key: str
    loss: dict[str, Any] | None
    sources: list[Source]
    whole: bool  # of `rl`; or else a trainer's own

    @property
    def path(self) -> str:
        """The import path, or "" where there is none that can be looked at."""
        path = (self.loss or {}).get("import_path")
        return path if isinstance(path, str) else ""


def read(files: Sequence[Path]) -> Run:
    """The merged files. ConfigError if one cannot be read or none is PRIME-RL's."""
    config: dict[str, Any] = {}
    for file in files:
        try:
            config = merged(config, tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not TOML: {error}") from None
    whole = any(name in config for name in ("trainer", "orchestrator", "inference"))
    if not whole and "loss" not in config and "model" not in config:
        raise ConfigError(
            f"{', '.join(map(str, files))}: no config of PRIME-RL's: it has none of the tables [trainer], "
            "[orchestrator], [inference] (rl.toml) or [loss], [model] (a trainer's own)"
        )
    holder = table(config, "trainer") if whole else config
    loss = holder.get("loss")
    key = "trainer.loss" if whole else "loss"
    if loss is not None and not isinstance(loss, dict):
        raise ConfigError(f"{key} is {loss!r}; wanted a table: [{key}] with type, import_path and kwargs")
    return Run(config, key, loss, list(_sources(config)), whole)


def merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Tables joined key by key, where the later file wins; lists are replaced, as PRIME-RL does."""
    out = dict(base)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def table(config: Any, *keys: str) -> dict[str, Any]:
    """The table under these keys; an empty one for what is absent, or is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _sources(config: dict[str, Any]) -> Iterator[Source]:
    orchestrator = table(config, "orchestrator")
    train = table(orchestrator, "train")
    # v0.8 has [[train.source]]; before, [[train.env]] and [[env]].
    for key, listed in (
        ("orchestrator.train.source", train.get("source")),
        ("orchestrator.train.env", train.get("env")),
        ("orchestrator.env", orchestrator.get("env")),
    ):
        for one in listed if isinstance(listed, list) else ():
            yield _source(orchestrator, one, key)


def _source(orchestrator: dict[str, Any], one: Any, key: str) -> Source:
    own, env = table(one, "algo"), table(one, "env")
    algo = own or table(orchestrator, "algo")
    ids = {f"{key}.env.taskset.id": table(env, "taskset").get("id"), f"{key}.env.id": env.get("id")}
    return Source(
        key,
        str(algo.get("type", DEFAULT_ALGORITHM)),
        f"{key}.algo.type" if own else "orchestrator.algo.type",
        table(algo, "filter"),
        {at: name for at, name in ids.items() if isinstance(name, str) and name},
    )
