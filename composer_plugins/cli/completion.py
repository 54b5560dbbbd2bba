"""Completion of names in a shell: the losses of this package, their dialects and their kinds."""

from collections.abc import Iterator
from typing import Annotated

import typer

from composer_plugins.losses.row import KINDS


def complete_loss(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield every loss with what it is, and the dialects of one whose name is typed."""
    from composer_plugins.losses.registry import collect, get_plugin_manager

    for loss in collect(get_plugin_manager(entry_points=False), kernels=False).losses:
        yield loss.name, loss.summary
        if incomplete.startswith(loss.name):
            yield from ((f"{loss.name}@{one.upstream}", one.source) for one in loss.dialects)


def complete_kind() -> list[str]:
    """Return the kinds of losses."""
    return [*KINDS]


KindOption = Annotated[
    str | None,
    typer.Option(
        help="The kind, where two kinds share the name: policy, advantage ...", autocompletion=complete_kind
    ),
]
