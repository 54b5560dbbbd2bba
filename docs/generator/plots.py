"""The pictures of each loss, light and dark, for a page and for a phone. They are kept below build/plots.

Other processes draw them while mkdocs reads the pages, and again only after the code of a loss has changed.
"""

import hashlib
import re
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import matplotlib
import torch

from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import Loss
from composer_plugins.plotting import drawing, picture
from docs.generator.written import ROOT

CODE = ("kernels", "composer_plugins/losses", "composer_plugins/plotting", "composer_plugins/testing")
SCHEMES, SIZES = ("light", "dark"), ("wide", "narrow")
BATCH = 6  # losses that a process draws at a time
# A dark picture is the light one in other colours, which takes less time than to draw it again.
LIGHT, DARK = ((*one.lines, *one[1:]) for one in (drawing.LIGHT, drawing.DARK))
COLOURS = dict(zip((one.lower() for one in LIGHT), DARK, strict=True))


def files() -> dict[str, Path]:
    """The file of each picture, by its name among the site's sources; `finish` waits until they are there."""
    return {
        f"losses/{loss.kind}/{path.name}": path
        for loss in registry().losses
        for path in _files(loss.kind, loss.name).values()
    }


@cache
def start() -> list[Future[None]]:
    """Start to draw the pictures that are missing."""
    missing = [
        (loss.kind, loss.name)
        for loss in registry().losses
        if not all(path.exists() for path in _files(loss.kind, loss.name).values())
    ]
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    return [pool.submit(draw, missing[i : i + BATCH]) for i in range(0, len(missing), BATCH)]


def finish() -> None:
    """Wait until every picture is drawn."""
    for one in start():
        one.result()


def draw(names: list[tuple[str, str]]) -> None:
    """Draw the pictures of losses, each of a kind and a name."""
    torch.set_num_threads(1)
    for kind, name in names:
        drawn = picture(name, kind=kind)
        drawn = replace(drawn, columns=min(2, drawn.columns))  # three would be small beside the navigation
        paths = _files(kind, name)
        (folder() / kind).mkdir(parents=True, exist_ok=True)
        for size in SIZES:
            light = paths[size, "light"]
            drawing.write(drawn, light, narrow=size == "narrow")
            paths[size, "dark"].write_text(darkened(light.read_text()))


def darkened(svg: str) -> str:
    """A light picture in the colours of a dark one."""
    return re.sub("|".join(COLOURS), lambda colour: COLOURS[colour[0]].lower(), svg)


def section(loss: Loss) -> str:
    """The picture on the page of its loss, which opens in full when it is clicked."""
    text = f"{loss.name}: its value and gradient, with all its dialects"
    images = [
        f"[![{text}]({path.name}#only-{scheme}){{ .{size} loading=lazy }}]({path.name})"
        for (size, scheme), path in _files(loss.kind, loss.name).items()
    ]
    return '<div class="plot" markdown>\n\n' + "\n".join(images) + "\n\n</div>"


def _files(kind: str, name: str) -> dict[tuple[str, str], Path]:
    return {
        (size, scheme): folder() / kind / f"{name}-{size}-{scheme}.svg"
        for size in SIZES
        for scheme in SCHEMES
    }


@cache
def folder() -> Path:
    """The folder of the pictures that this state of the code draws."""
    state = hashlib.sha256(f"{matplotlib.__version__} {torch.__version__}".encode())
    for name in CODE:
        for path in sorted((ROOT / name).rglob("*.py")):
            state.update(path.read_bytes())
    return ROOT / "build" / "plots" / state.hexdigest()[:24]
