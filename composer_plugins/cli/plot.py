"""`composer-plugins plot`: losses drawn side by side, as a file, in a window or in the terminal."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, foreign_code, page
from composer_plugins.errors import ConfigError

MOST_COLUMNS = 120


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
    text: Annotated[
        bool, typer.Option("--text", help="Draw in the terminal: this needs no matplotlib.")
    ] = False,
    dark: Annotated[bool, typer.Option("--dark", help="Light lines on a dark ground.")] = False,
) -> None:
    """Draw what losses do: value and gradient of each, over one another.

    A loss that is named alone comes with all its dialects. Losses of one picture are of one kind.
    Without --out and --show the picture is drawn in the terminal.
    """
    from composer_plugins import plotting

    if dark and out is None and not show:
        raise ConfigError("--dark", "it has no effect in the terminal", "add --out or --show, or remove it")
    if out or show:  # matplotlib may be missing, which is known before anything is computed
        from composer_plugins.plotting import drawing
    with foreign_code():
        picture = plotting.picture(names, kind=kind)
    if out:
        drawing.write(picture, out, dark=dark, key="--out")
        answer(f"wrote {out}")
    if text or not (out or show):
        from composer_plugins.plotting.terminal import render

        width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
        with page() as console:
            console.print(render(picture, width), soft_wrap=True)
    if show:
        drawing.show(picture, dark=dark)
