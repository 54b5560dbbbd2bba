"""Completion of names in a shell: the losses of this package, their dialects, and the values of options."""

from collections.abc import Iterator
from typing import Annotated

import typer

from composer_plugins.losses.row import KINDS, Loss


def complete_loss(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield every loss with what it is, and the dialects of one whose name is typed."""
    for loss in _losses():
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


def complete_input() -> list[str]:
    """Return the inputs of losses."""
    return sorted({name for loss in _losses() for name in (*loss.needs, *loss.optional)})


def complete_framework() -> list[str]:
    """Return the frameworks that run losses of ours."""
    from composer_plugins.frameworks.registry import running

    return [one.name for one in running()]


def complete_upstream() -> list[str]:
    """Return the upstreams of dialects."""
    return sorted({dialect.upstream for loss in _losses() for dialect in loss.dialects})


def complete_compared() -> list[tuple[str, str]]:
    """Return the frameworks that `conform` compares with."""
    from composer_plugins.frameworks.registry import OURS

    return [(one.name, one.title) for one in OURS if one.claims]


def complete_convention() -> list[str]:
    """Return the conventions of `check --as`."""
    from composer_plugins.frameworks.registry import conventions

    return [*conventions()]


def _losses() -> tuple[Loss, ...]:
    from composer_plugins.losses.registry import collect, get_plugin_manager

    return collect(get_plugin_manager(entry_points=False), kernels=False).losses
