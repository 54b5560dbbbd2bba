"""Losses on a recorded step: the gradient weight of its tokens, as a picture and as a page."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from io import BytesIO
from itertools import product
from pathlib import Path
from string import Template

import torch
from torch import Tensor

from composer_plugins.comparing import PAIRS, Measured
from composer_plugins.errors import ConfigError
from composer_plugins.plotting.data import Panel, Picture, Series
from composer_plugins.plotting.drawing import DOTS_PER_INCH, draw

DOTS = 400  # of a loss in a panel; of more tokens, so many are drawn


def picture(measured: Sequence[Measured], title: str) -> Picture:
    """The gradient weight by the ratio and by the position of a token, for each sign of the advantage.

    Raises ConfigError where no token has an advantage, as in preference pairs.
    """
    panels = []
    for is_ratio, sign in product((True, False), (1, -1)):
        found = list[Series]()
        for one in measured:
            where = one.mask & (one.advantages * sign > 0)
            x = (one.ratios if is_ratio else one.mask.cumsum(-1) - 1)[where]
            x, y = (_thinned if is_ratio else _means)(x, one.weight[where])
            found += [Series(one.label, tuple(x.tolist()), tuple(y.tolist()))] if len(x) else []
        labels = ("ratio", "gradient weight") if is_ratio else ("position", "mean gradient weight")
        heading, reference = f"A {'>' if sign > 0 else '<'} 0", 1.0 if is_ratio else None
        panels += [Panel(heading, *labels, tuple(found), (), reference, is_ratio)] if found else []
    if not panels or measured[0].mode == PAIRS:
        raise ConfigError("--out", "these losses have no ratio to draw against", "leave it out, or use plot")
    notes = ["Gradient weight: |d loss / d log π| / |A| of a token, before the reduction. REINFORCE has 1."]
    if beyond := list(dict.fromkeys(label for panel in panels for label in panel.beyond)):
        notes.append(f"{'; '.join(beyond)}: of a much larger scale, and cut at the edge of some panels.")
    return Picture(tuple(panels), 2, tuple(notes), title)


def _thinned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return at most `DOTS` points in the order of x, with the first and the last one."""
    kept = x.argsort()[torch.linspace(0, len(x) - 1, min(DOTS, len(x))).long()]
    return x[kept], y[kept]


def _means(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of y at each x."""
    places, index, counts = x.unique(return_inverse=True, return_counts=True)
    return places, torch.zeros(len(places), dtype=y.dtype).index_add(0, index, y) / counts


def page(picture: Picture, text: str) -> str:
    """Return one HTML file with the picture, in light and in dark colours, and a text. It loads nothing."""
    sources = dict[str, str]()
    for name in ("light", "dark"):
        figure, file = draw(replace(picture, columns=1), dark=name == "dark"), BytesIO()
        figure.savefig(file, dpi=DOTS_PER_INCH, facecolor=figure.get_facecolor())
        sources[name] = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    template = Template(Path(__file__).with_suffix(".html").read_text())
    return template.substitute(sources, title=escape(picture.title), text=escape(text))
