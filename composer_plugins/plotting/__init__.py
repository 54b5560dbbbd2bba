"""Pictures of losses: what `composer-plugins plot` and the site show.

- `picture(names)`: the curves and bars as data, from the kernels themselves
- `figure(names)`: with matplotlib (install `composer-plugins[plot]`)
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_plugins.plotting.data import Picture

__all__ = ["figure", "picture"]


def picture(names: str | Iterable[str], *, kind: str | None = None) -> "Picture":
    """Return what is drawn of losses of one kind, as data.

    A name is a loss ("cispo"), a dialect ("cispo@trl"), an import path ("my_package.losses:my_loss") or a
    file ("my_losses.py:my_loss"). A loss that is named alone comes with all its dialects. Where two kinds
    share the name, the policy loss is meant unless `kind` names another.
    Raises ConfigError for an unknown name and for losses that do not fit on one picture.
    """
    from composer_plugins.plotting.kinds import choices, picture_of  # loads torch

    return picture_of(choices([names] if isinstance(names, str) else [*names], kind))


def figure(names: str | Iterable[str], *, kind: str | None = None, dark: bool = False) -> Any:
    """Return a matplotlib Figure of `picture(names)`, with light lines on a dark ground where `dark`."""
    from composer_plugins.plotting.drawing import draw

    return draw(picture(names, kind=kind), dark=dark)
