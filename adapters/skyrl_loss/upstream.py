"""What is SkyRL's own: its release, its config as a table, and the code of its off-policy correction."""

import sys
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.config import ABSENT, entry
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.skyrl import CORRECTION, SKYRL, Key
from composer_plugins.objective.by_table import nested

CONFIG = "skyrl.train.config.config"  # its module of the config's classes
PADDING_UID = "pad"  # the uid of a row with which SkyRL pads a batch begins with this


def release_of(version: str | None) -> str:
    """The release whose defaults count: of `version`, else of the installed SkyRL, else the newest known.

    Where SkyRL's config is loaded, its class says it: SkyRL's main branch has the version 0.3.0, and the
    options of 0.4.
    Raises ConfigError for a `version` of another release than those that are known.
    """
    if version is not None and _numbers(version) not in map(_numbers, SKYRL.releases):
        known = ", ".join(SKYRL.releases)
        raise ConfigError("--version", f"SkyRL {version} is not known here", f"set one of {known}")
    if version is None and (loaded := sys.modules.get(CONFIG)) is not None:
        return "0.4" if hasattr(loaded.CISPOConfig, Key.ANCHOR.rpartition(".")[2]) else "0.3"
    if version is None:
        try:
            version = version_of("skyrl")
        except PackageNotFoundError:
            return SKYRL.release
    older = [one for one in SKYRL.releases if _numbers(one) <= _numbers(version)]
    return older[-1] if older else SKYRL.releases[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in version.split(".")[:2] if one.isdigit())


def as_table(config: Any) -> dict[str, Any]:
    """SkyRL's AlgorithmConfig, a dataclass or a namespace, as a config from its root."""
    found = asdict(config) if is_dataclass(config) and not isinstance(config, type) else _plain(config)
    return {"trainer": {"algorithm": found}}


def moved(algorithm: Any) -> dict[str, Any]:
    """The options that are not at the default of their class, or for a namespace of our table, by key."""
    of_table = nested({one.key: one.default for one in SKYRL.options})
    default = as_table(type(algorithm)()) if is_dataclass(type(algorithm)) else of_table
    found = {one.key: entry(as_table(algorithm), one.key) for one in SKYRL.options}
    return {key: x for key, x in found.items() if x not in (ABSENT, entry(default, key))}


def _plain(value: Any) -> Any:
    table = vars(value) if isinstance(value, SimpleNamespace) else value
    return {key: _plain(one) for key, one in table.items()} if hasattr(table, "items") else table


def corrected(
    loss: Tensor, old: Tensor, rollout: Tensor | None, weights: Tensor, config: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss per token and its weights after SkyRL's off_policy_correction, and what SkyRL logs of it.

    Raises ConfigError where it is set without rollout log-probabilities: SkyRL would leave it out.
    """
    options = getattr(config, CORRECTION.rpartition(".")[2], None)
    if options is None:
        return loss, weights, {}
    from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as theirs

    if not theirs.off_policy_correction_enabled(options):
        return loss, weights, {}
    if rollout is None:
        problem = "it is set, and SkyRL has no log-probabilities of the rollout policy"
        raise ConfigError(CORRECTION, problem, f"set {Key.LOGPROBS}=1, or remove it")
    # At a masked token the two are equal, so that nothing of it reaches SkyRL's products with 0.
    old, rollout = (torch.where(weights > 0, x, 0.0) for x in (old, rollout))
    found: tuple[Tensor, Tensor, dict[str, float]] = theirs.apply_off_policy_correction(
        loss, old, rollout, weights, options
    )
    return found
