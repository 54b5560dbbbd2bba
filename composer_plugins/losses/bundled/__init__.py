"""The losses that this distribution brings, through the hook that a third party uses."""

from collections.abc import Callable
from itertools import chain

from composer_plugins.hookspecs import hookimpl
from composer_plugins.losses.bundled import (
    advantages,
    divergences,
    off_policy,
    policy,
    preference,
    reduction,
    regions,
)
from composer_plugins.losses.row import Loss

FAMILIES = (policy, regions, off_policy, advantages, divergences, preference, reduction)


@hookimpl(tryfirst=True)
def register_losses(register: Callable[[Loss], None]) -> None:
    """Register every bundled loss."""
    for loss in chain.from_iterable(family.LOSSES for family in FAMILIES):
        register(loss)
