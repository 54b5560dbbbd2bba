"""A picture with matplotlib: one figure, its panels above, the legend and the notes below."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from composer_plugins.errors import ConfigError, writing
from composer_plugins.plotting.data import Panel, Picture, Series, heights

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise ConfigError(
        "plot",
        "it needs matplotlib, which is not installed here",
        "run pip install 'composer-plugins[plot]'",
    ) from None

SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 144
PANEL, LINE = (4.7, 2.9), 0.19  # inches: a panel, and a line of text below them
NOTE_SIZE, NOTE_WIDTH = 8.5, 15  # points, and letters in an inch
STYLES: tuple[object, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
ROOM = 0.07  # of the height, above and below the lines
MOST_NUMBERS, MOST_UPRIGHT = 12, 8  # above as many bars; with more, they are turned
CLOSE_TO_1 = 0.02  # a mark with more digits
NEAR = 0.1  # of the axis: closer labels of marks stand on two lines


class Colours(NamedTuple):
    """Okabe and Ito's colours, which people with colour blindness tell apart, and those of the page."""

    lines: tuple[str, ...]
    ink: str
    faint: str
    ground: str


LIGHT = Colours(
    ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"),
    "#1a1a1a",
    "#b5b5b5",
    "#ffffff",
)
DARK = Colours(
    ("#56B4E9", "#F08A3C", "#2FC79D", "#E29AC4", "#F0E442", "#7FA8FF", "#bbbbbb"),
    "#e6e6e6",
    "#6a6a6a",
    "#15181d",
)


def draw(picture: Picture, *, dark: bool = False) -> Figure:
    """Draw a picture on a new figure."""
    colours = DARK if dark else LIGHT
    figure = Figure(layout="constrained")
    labels = picture.labels
    columns, rows = picture.columns, -(-len(picture.panels) // picture.columns)
    wide = max(PANEL[0] * columns, 6.5)
    notes = [part for note in picture.notes for part in textwrap.wrap(note, int(wide * NOTE_WIDTH))]
    per_row = max(1, min(len(labels), int(wide * 9 // (max(map(len, labels)) + 8))))
    below = LINE * (-(-len(labels) // per_row) + 0.85 * len(notes) + 1)
    figure.set_size_inches(wide, PANEL[1] * rows + 0.4 + below)
    figure.set_facecolor(colours.ground)
    top, bottom = figure.subfigures(2, 1, height_ratios=(PANEL[1] * rows + 0.4, below))
    top.suptitle(picture.title, color=colours.ink, weight="bold", size=12)
    axes = top.subplots(rows, columns, squeeze=False).flatten().tolist()
    bounds = heights(picture)
    styles = {label: i for i, label in enumerate(labels)}
    for i, (panel, one) in enumerate(zip(picture.panels, axes, strict=False)):
        row = picture.panels[i // columns * columns :][:columns]
        one.set_title(panel.title, color=colours.ink, size=10, pad=_pad(row))
        low, high = bounds[i]
        room = ROOM * (high - low)
        one.set_ylim(low - room, high + room)
        if low <= 0 <= high:
            one.axhline(0, color=colours.faint, linewidth=0.9, zorder=0)
        _draw_panel(one, panel, styles, colours)
    for one in axes[len(picture.panels) :]:
        one.set_axis_off()
    found = [zip(*one.get_legend_handles_labels(), strict=True) for one in axes]
    handles = {label: handle for pairs in found for handle, label in pairs}
    legend = dict(loc="upper center", frameon=False, labelcolor=colours.ink, fontsize=9.5, handlelength=2.6)
    bottom.legend([handles[label] for label in labels], labels, ncols=per_row, **legend)
    note = dict(va="bottom", ha="left", color=colours.ink, size=NOTE_SIZE, linespacing=1.35)
    bottom.text(0.02, 0.06, "\n".join(notes), **note)
    for part in (top, bottom):
        part.set_facecolor(colours.ground)
    return figure


def write(picture: Picture, path: Path, *, dark: bool = False) -> None:
    """Write a picture to a PNG or SVG file; its bytes depend on nothing but the picture and matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("--out", f"{str(path)!r} has another suffix", f"end it in {' or '.join(SUFFIXES)}")
    dateless = {"Date": None} if path.suffix.lower() == ".svg" else {}
    # Letters as text, which can be searched, read aloud and is smaller than their outlines.
    with matplotlib.rc_context({"svg.hashsalt": "composer-plugins", "svg.fonttype": "none"}):
        figure = draw(picture, dark=dark)
        with writing("--out", path):
            figure.savefig(path, dpi=DOTS_PER_INCH, facecolor=figure.get_facecolor(), metadata=dateless)


def _draw_panel(axes: Axes, panel: Panel, styles: dict[str, int], colours: Colours) -> None:
    axes.set_facecolor(colours.ground)
    axes.set_xlabel(panel.x_label, color=colours.ink, size=9)
    axes.set_ylabel(panel.y_label, color=colours.ink, size=9)
    axes.tick_params(colors=colours.ink, labelsize=8.5)
    axes.grid(visible=True, color=colours.faint, alpha=0.35, linewidth=0.6, axis="y")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(colours.faint)
    if panel.categories:
        _draw_bars(axes, panel, styles, colours)
    else:
        _draw_lines(axes, panel, styles, colours)


def _draw_lines(axes: Axes, panel: Panel, styles: dict[str, int], colours: Colours) -> None:
    if panel.reference is not None:
        axes.axvline(panel.reference, color=colours.faint, linewidth=0.9, linestyle=":")
    for series in panel.series:
        i = styles[series.label]
        style, colour = STYLES[i % len(STYLES)], _colour(i, colours)
        thick = 2.4 - 0.15 * min(i, 5)
        axes.plot(series.x, series.y, color=colour, linestyle=style, linewidth=thick, label=series.label)
    first, last = _span(panel)
    axes.set_xlim(first, last)
    axes.ticklabel_format(useOffset=False)
    _draw_marks(axes, panel, styles, colours, first, last)
    _draw_caps(axes, panel.series, styles, colours)


def _draw_marks(
    axes: Axes, panel: Panel, styles: dict[str, int], colours: Colours, first: float, last: float
) -> None:
    """A thin line at each end of a clip range, with its number above the axes."""
    for mark, (label, line) in _marks(panel, first, last).items():
        colour = _colour(styles[label], colours)
        axes.axvline(mark, color=colour, linewidth=0.8, alpha=0.75)
        where, digits = axes.get_xaxis_transform(), 5 if abs(mark - 1) < CLOSE_TO_1 else 3
        text = f"{mark:.{digits}g}"
        axes.text(mark, 1.01 + 0.07 * line, text, color=colour, size=8, ha="center", transform=where)


def _draw_caps(axes: Axes, series: Sequence[Series], styles: dict[str, int], colours: Colours) -> None:
    """At the right end, the value at which a line stays."""
    by_value = {f"{s.cap:.4g}": s for s in reversed([*series]) if s.cap is not None}
    for value, one in by_value.items():
        colour = _colour(styles[one.label], colours)
        # Below the line where another one ends closely above it.
        low, high = axes.get_ylim()
        closely = any(0 < s.y[-1] - one.y[-1] < 0.25 * (high - low) for s in series)
        text = dict(color=colour, size=10, weight="bold", ha="right", va="top" if closely else "bottom")
        where = (-2, -3 if closely else 2)
        axes.annotate(f"stays at {value}", (one.x[-1], one.y[-1]), where, textcoords="offset points", **text)


def _draw_bars(axes: Axes, panel: Panel, styles: dict[str, int], colours: Colours) -> None:
    width = 0.8 / len(styles)
    for series in panel.series:
        i = styles[series.label]
        left = [x - 0.4 + width * (i + 0.5) for x in series.x]
        bars = axes.bar(left, series.y, width * 0.92, color=_colour(i, colours), label=series.label)
        if (numbers := len(panel.categories) * len(panel.series)) <= MOST_NUMBERS:
            turned = 90 if numbers > MOST_UPRIGHT else 0
            axes.bar_label(bars, fmt="%.2g", size=7.5, color=colours.ink, padding=2, rotation=turned)
    axes.set_xticks(range(len(panel.categories)), panel.categories)
    without_numbers = len(panel.categories) * len(panel.series) > MOST_NUMBERS
    if without_numbers and not any(y for series in panel.series for y in series.y):
        axes.text(0.5, 0.55, "0 for all", color=colours.ink, size=9, ha="center", transform=axes.transAxes)


def _marks(panel: Panel, first: float, last: float) -> dict[float, tuple[str, int]]:
    """Each mark within the axes once: the first series that has it, and how high its number stands."""
    owners = {mark: s.label for s in reversed(panel.series) for mark in s.marks if first < mark < last}
    found, before, line = dict[float, tuple[str, int]](), -float("inf"), 0
    for mark, label in sorted(owners.items()):
        line = 1 - line if mark - before < NEAR * (last - first) else 0
        found[mark], before = (label, line), mark
    return found


def _span(panel: Panel) -> tuple[float, float]:
    return min(s.x[0] for s in panel.series), max(s.x[-1] for s in panel.series)


def _pad(row: Sequence[Panel]) -> int:
    """Points between the titles of a row of panels and the axes: room for the numbers of marks."""
    lines = [line for panel in row for _, line in _marks(panel, *_span(panel)).values()]
    return 20 + 12 * max(lines) if lines else 8


def _colour(i: int, colours: Colours) -> str:
    return colours.lines[i % len(colours.lines)]
