"""The plugin manager, and the catalogue it collects."""

import pluggy

from composer_plugins import bundled, hookspecs
from composer_plugins.catalogue import Loss
from composer_plugins.errors import ConfigError


def get_plugin_manager() -> pluggy.PluginManager:
    """A new manager that knows our hooks and has the bundled losses registered."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(bundled, name="composer-plugins")
    manager.check_pending()  # a misspelt hook would otherwise be ignored
    return manager


def losses(manager: pluggy.PluginManager | None = None) -> dict[str, Loss]:
    """Every registered loss by name; two of one name are an error."""
    found: dict[str, Loss] = {}

    def register(loss: Loss) -> None:
        if loss.name in found:
            raise ConfigError(
                f"loss {loss.name!r} is registered twice, as {found[loss.name].path} and as "
                f"{loss.path}: rename one"
            )
        found[loss.name] = loss

    (manager or get_plugin_manager()).hook.register_losses(register=register)
    return found
