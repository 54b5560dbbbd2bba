"""What the adapter relies on in NeMo-RL, 7ea279a: the module with the types of losses, and its options."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.nemo_rl import LOSS, NEMO_RL


def interfaces() -> Any:
    """NeMo-RL's module with the types of losses, which is imported when NeMo-RL asks for one."""
    return import_module("nemo_rl.algorithms.loss.interfaces")


def table_of(loss_config: Any) -> dict[str, Any]:
    """NeMo-RL's options, which are a pydantic model or a dict."""
    if hasattr(loss_config, "model_dump"):
        return dict(loss_config.model_dump())
    if not isinstance(loss_config, Mapping):
        raise ConfigError(
            LOSS, f"it is {type(loss_config).__name__}", "pass master_config.loss_fn, or a dict"
        )
    return dict(loss_config)


def moved(loss_config: Any) -> dict[str, Any]:
    """The options that are not at the default of their class, by their keys in the YAML.

    A dict has no class, so the defaults of our table count.
    """
    fields = getattr(type(loss_config), "model_fields", NOTHING).items()
    default = {one.key: one.default for one in NEMO_RL.options}
    default |= {f"{LOSS}.{name}": one.get_default(call_default_factory=True) for name, one in fields}
    given = {f"{LOSS}.{name}": value for name, value in table_of(loss_config).items()}
    return {key: value for key, value in given.items() if value != default.get(key)}
