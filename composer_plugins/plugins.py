"""The plugin manager, and the catalogue it collects."""

import pluggy

from composer_plugins import bundled, hookspecs
from composer_plugins.catalogue import Kind, Loss
from composer_plugins.errors import ConfigError


def get_plugin_manager() -> pluggy.PluginManager:
    """A new manager that knows our hooks and has the bundled losses registered."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(bundled, name="composer-plugins")
    manager.check_pending()  # a misspelt hook would otherwise be ignored
    return manager


def losses(manager: pluggy.PluginManager | None = None) -> tuple[Loss, ...]:
    """Every registered loss; two of one kind and name are an error."""
    found: dict[tuple[Kind, str], Loss] = {}

    def register(loss: Loss) -> None:
        key = (loss.kind, loss.name)
        if key in found:
            raise ConfigError(
                f"{loss.kind} {loss.name!r} is registered twice, as {found[key].path} and as "
                f"{loss.path}: rename one"
            )
        found[key] = loss

    (manager or get_plugin_manager()).hook.register_losses(register=register)
    return tuple(found.values())
