"""The user's TOML as PRIME-RL reads it."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_plugin.upstream import DEFAULT_ALGORITHM
from composer_plugins.errors import ConfigError


class Source(NamedTuple):
    """A training environment and the algorithm of its samples."""

    key: str
    algorithm: str
    algorithm_key: str
    filter: dict[str, Any]  # the algorithm's, with import_path and kwargs
    plugins: dict[str, str]  # what verifiers imports, by the key that names it


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
    is_for_rl = any(name in config for name in ("trainer", "orchestrator", "inference"))
    if not is_for_rl and "loss" not in config and "model" not in config:
        problem = "is not a config of PRIME-RL: it has none of its tables"
        remedy = "give one with [trainer], [orchestrator] or [inference] (rl.toml), or with [loss] or [model]"
        raise ConfigError(", ".join(map(str, files)), problem, remedy)
    loss = (table(config, "trainer") if is_for_rl else config).get("loss")
    key = "trainer.loss" if is_for_rl else "loss"
    if loss is not None and not isinstance(loss, dict):
        remedy = f"make it a table: [{key}] with type, import_path and kwargs"
        raise ConfigError(key, f"it is {loss!r}", remedy)
    return Run(config, key, loss, list(_sources(config)), is_for_rl)


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
            own, env = table(one, "algo"), table(one, "env")
            algo = own or table(orchestrator, "algo")
            ids = {f"{key}.env.taskset.id": table(env, "taskset").get("id"), f"{key}.env.id": env.get("id")}
            yield Source(
                key,
                str(algo.get("type", DEFAULT_ALGORITHM)),
                f"{key}.algo.type" if own else "orchestrator.algo.type",
                table(algo, "filter"),
                {at: name for at, name in ids.items() if isinstance(name, str) and name},
            )
