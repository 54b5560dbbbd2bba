"""`composer-plugins plot`: losses drawn side by side with matplotlib, as a file."""

from pathlib import Path
from typing import Annotated

import typer

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, foreign_code


def plot(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Losses (grpo), dialects (cispo@trl), or functions (my_package.losses:my_loss, "
            "my_losses.py:my_loss).",
            autocompletion=complete_loss,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The PNG or SVG file to write, by its suffix.")],
    kind: KindOption = None,
    dark: Annotated[bool, typer.Option("--dark", help="Light lines on a dark ground.")] = False,
) -> None:
    """Draw what losses do: value and gradient of each, over one another.

    A loss that is named alone comes with all its dialects. Losses of one picture are of one kind.
    It needs matplotlib: pip install 'composer-plugins[plot]'.
    """
    from composer_plugins import plotting
    from composer_plugins.plotting import drawing  # an error without matplotlib, before anything is computed

    with foreign_code():
        picture = plotting.picture(names, kind=kind)
    drawing.write(picture, out, dark=dark)
    answer(f"wrote {out}")
