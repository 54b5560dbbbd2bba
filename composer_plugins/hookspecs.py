"""The hooks a plugin may implement; the argument of each must be called `register`."""

from collections.abc import Callable

import pluggy

from composer_plugins.adapter import Adapter
from composer_plugins.losses.row import Loss

PROJECT = "composer_plugins"  # also the entry-point group

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_losses(register: Callable[[Loss], None]) -> None:
    """Call ``register(loss)`` for each loss: a catalogue row that names its kernel."""


@hookspec
def register_adapters(register: Callable[[Adapter], None]) -> None:
    """Call ``register(adapter)`` for each framework adapter: what it can feed a kernel with."""
