"""The hooks a plugin may implement; the argument of each must be called `register`."""

from collections.abc import Callable
from typing import Any

import pluggy

PROJECT = "composer_plugins"  # also the entry-point group

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_losses(register: Callable[[Any], None]) -> None:
    """Call ``register(loss)`` for each loss: a `losses.row.Loss`, which names its kernel."""


@hookspec
def register_frameworks(register: Callable[[Any], None]) -> None:
    """Call ``register(framework)`` for each framework: a `frameworks.contract.Framework`."""
