"""The hooks a plugin may implement."""

from collections.abc import Callable

import pluggy

from composer_plugins.catalogue import Loss

PROJECT = "composer_plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_losses(register: Callable[[Loss], None]) -> None:
    """Call ``register(loss)`` for each loss: a catalogue row that names its kernel."""
