"""What the adapter relies on in NeMo-RL, 7ea279a: the module with the types of losses, and its options."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.nemo_rl import LOSS, NEMO_RL
from composer_plugins.objective.by_table import ByTable


def interfaces() -> Any:
    """NeMo-RL's module with the types of losses, which is imported when NeMo-RL asks for one."""
    return import_module("nemo_rl.algorithms.loss.interfaces")


def table_of(loss_config: Any) -> dict[str, Any]:
    """NeMo-RL's options, which are a pydantic model or a dict."""
    if hasattr(loss_config, "model_dump"):
        return dict(loss_config.model_dump())
    if not isinstance(loss_config, Mapping):
        problem = f"it is {type(loss_config).__name__}"
        raise ConfigError(LOSS, problem, "pass master_config.loss_fn, or a dict")
    if LOSS in loss_config:
        raise ConfigError(
            LOSS, "it is a whole config, whose table of this name is not read", "pass that table"
        )
    return dict(loss_config)


def moved(loss_config: Any) -> dict[str, Any]:
    """The options that are not at the default of their class, or for a dict of our table, by their keys."""
    if not hasattr(loss_config, "model_dump"):
        return ByTable(NEMO_RL).given({LOSS: loss_config})
    return {f"{LOSS}.{name}": x for name, x in loss_config.model_dump(exclude_defaults=True).items()}
