"""`composer-plugins plot`: losses drawn side by side with matplotlib, as a file or in a window."""

from pathlib import Path
from typing import Annotated

import typer

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, foreign_code
from composer_plugins.errors import ConfigError


def plot(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Losses (grpo), dialects (cispo@trl) or import paths (my_package.losses:my_loss).",
            autocompletion=complete_loss,
        ),
    ],
    kind: KindOption = None,
    out: Annotated[Path | None, typer.Option(help="Write a PNG or SVG file, by its suffix.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Open a window.")] = False,
    dark: Annotated[bool, typer.Option("--dark", help="Light lines on a dark ground.")] = False,
) -> None:
    """Draw what losses do: value and gradient of each, over one another.

    A loss that is named alone comes with all its dialects. Losses of one picture are of one kind.
    It needs matplotlib: pip install 'composer-plugins[plot]'.
    """
    if not (out or show):
        raise ConfigError("plot", "no place for the picture is named", "add --out picture.png, or --show")
    from composer_plugins import plotting
    from composer_plugins.plotting import drawing  # an error without matplotlib, before anything is computed

    with foreign_code():
        picture = plotting.picture(names, kind=kind)
    if out:
        drawing.write(picture, out, dark=dark, key="--out")
        answer(f"wrote {out}")
    if show:
        drawing.show(picture, dark=dark)
