"""A picture with matplotlib: one figure, its panels above, the legend and the notes below."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError, writing
from composer_plugins.plotting.data import Panel, Picture, Series, heights

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
except ImportError:
    raise ConfigError(
        "plot", "it needs matplotlib, which is not installed here", "run pip install 'composer-plugins[plot]'"
    ) from None

SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 144
# Inches: a panel with its numbers and labels, the height of its axes, and what is above and below these.
PANEL, HEIGHT, HEAD, FOOT = 4.7, 2.1, 0.3, 0.42
RIGHT, WITH_CAPS = 0.15, 0.62  # inches to the right of the axes, and where values of caps stand there
TITLE, X_LABEL, MARK, LEGEND, NOTE = 0.32, 0.15, 0.155, 0.2, 0.165  # inches of one line
NOTE_SIZE, LEGEND_SIZE, X_SIZE, MARK_SIZE, CAP_SIZE = 8.5, 9.5, 9, 8, 9.5  # points
LETTER = 0.6  # of a font's size: how wide a letter is on average
GAP, CAP = 0.07, 0.18  # inches between numbers of marks, and from one value of a cap to the next
LEAST = 6.5  # inches: a figure of one column is as wide as its legend needs
# Letters as text, which can be searched, read aloud and is smaller than their outlines.
SETTINGS = {"svg.hashsalt": "composer-plugins", "svg.fonttype": "none"}
STYLES: tuple[object, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
ROOM = 0.07  # of the height, above and below the lines
MOST_NUMBERS, MOST_UPRIGHT = 12, 8  # above as many bars; with more, they are turned
CLOSE_TO_1 = 0.02  # a mark with more digits

Marks = dict[float, tuple[str, int]]  # of each mark its series, and the line of its number


class Colours(NamedTuple):
    """Okabe and Ito's colours, which people with colour blindness tell apart, and the page's colours."""

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


def draw(picture: Picture, *, dark: bool = False, narrow: bool = False) -> Figure:
    """Draw a picture on a new figure; `narrow`: one column, as wide as a panel."""
    colours, columns = DARK if dark else LIGHT, 1 if narrow else picture.columns
    wide = PANEL if narrow else max(PANEL * columns, LEAST)
    panel_width = wide / columns
    rows = [picture.panels[i : i + columns] for i in range(0, len(picture.panels), columns)]
    x_labels = [[_wrapped(panel.x_label, X_SIZE, panel_width - 0.3) for panel in row] for row in rows]
    marks = [[_marks(panel, *_span(panel), panel_width - 1) for panel in row] for row in rows]
    lines = [max((1 + line for one in row for _, line in one.values()), default=0) for row in marks]
    feet = [FOOT + X_LABEL * max(label.count("\n") + 1 for label in row) for row in x_labels]
    labels = picture.labels
    legend = [_wrapped(label, LEGEND_SIZE, wide - 0.8) for label in labels]
    longest = max(len(line) for label in legend for line in label.split("\n"))
    per_row = max(1, min(len(labels), int(wide / (longest * LETTER * LEGEND_SIZE / 72 + 0.75))))
    legend_lines = -(-sum(label.count("\n") + 1 for label in legend) // per_row)
    notes = [line for note in picture.notes for line in _wrapped(note, NOTE_SIZE, wide - 0.3).split("\n")]
    head = TITLE if picture.title else 0.05
    above = head + sum(HEAD + MARK * n + HEIGHT + foot for n, foot in zip(lines, feet, strict=True))
    tall = above + LEGEND * (legend_lines + 0.75) + NOTE * (len(notes) + 0.5)
    figure = Figure((wide, tall), facecolor=colours.ground)
    figure.text(
        0.5, 1 - 0.08 / tall, picture.title, color=colours.ink, weight="bold", size=12, ha="center", va="top"
    )
    bounds, styles = iter(heights(picture)), {label: i for i, label in enumerate(labels)}
    handles, top = dict[str, Any](), tall - head
    for row, row_marks, row_labels, n, foot in zip(rows, marks, x_labels, lines, feet, strict=True):
        bottom = top - HEAD - MARK * n - HEIGHT
        for i, panel in enumerate(row):
            axes = figure.add_axes((0.1, bottom / tall, 0.1, HEIGHT / tall))
            low, high = next(bounds)
            axes.set_ylim(low - ROOM * (high - low), high + ROOM * (high - low))
            numbers = axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())
            left = 0.43 + max(3, *map(len, numbers)) * LETTER * 8.5 / 72
            width = panel_width - left - (WITH_CAPS if picture.has_caps else RIGHT)
            axes.set_position(((panel_width * i + left) / wide, bottom / tall, width / wide, HEIGHT / tall))
            # A given height keeps matplotlib from moving the title.
            axes.set_title(panel.title, color=colours.ink, size=10, y=1.0, pad=72 * (0.07 + MARK * n))
            axes.set_xlabel(row_labels[i], color=colours.ink, size=X_SIZE)
            if low <= 0 <= high:
                axes.axhline(0, color=colours.faint, linewidth=0.9, zorder=0)
            _draw_panel(axes, panel, row_marks[i], styles, colours)
            handles |= {
                label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
        top = bottom - foot
    figure.legend(
        [handles[label] for label in labels], legend, ncols=per_row, loc="upper center", frameon=False,
        labelcolor=colours.ink, fontsize=LEGEND_SIZE, handlelength=2.6, bbox_to_anchor=(0.5, top / tall),
        borderaxespad=0,
    )  # fmt: skip
    for i, note in enumerate(reversed(notes)):
        figure.text(
            0.15 / wide, (0.08 + NOTE * i) / tall, note, color=colours.ink, size=NOTE_SIZE, va="bottom"
        )
    return figure


def write(picture: Picture, path: Path, *, dark: bool = False, narrow: bool = False) -> None:
    """Write a picture to a PNG or SVG file; its bytes depend on nothing but the picture and matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("--out", f"{str(path)!r} has another suffix", f"end it in {' or '.join(SUFFIXES)}")
    with matplotlib.rc_context(SETTINGS):
        figure = draw(picture, dark=dark, narrow=narrow)
        with writing("--out", path):
            if path.suffix.lower() == ".svg":  # savefig would draw twice
                FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
            else:
                figure.savefig(path, dpi=DOTS_PER_INCH, facecolor=figure.get_facecolor())


def _draw_panel(axes: Axes, panel: Panel, marks: Marks, styles: dict[str, int], colours: Colours) -> None:
    axes.set_facecolor(colours.ground)
    axes.set_ylabel(panel.y_label, color=colours.ink, size=9)
    axes.tick_params(colors=colours.ink, labelsize=8.5)
    axes.grid(visible=True, color=colours.faint, alpha=0.35, linewidth=0.6, axis="y")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(colours.faint)
    if panel.categories:
        _draw_bars(axes, panel, styles, colours)
    else:
        _draw_lines(axes, panel, marks, styles, colours)


def _draw_lines(axes: Axes, panel: Panel, marks: Marks, styles: dict[str, int], colours: Colours) -> None:
    if panel.reference is not None:
        axes.axvline(panel.reference, color=colours.faint, linewidth=0.9, linestyle=":")
    for series in panel.series:
        i = styles[series.label]
        style, colour = STYLES[i % len(STYLES)], _colour(i, colours)
        thick = 2.4 - 0.15 * min(i, 5)
        how = dict(linestyle="", marker=".") if panel.has_dots else dict(linestyle=style, linewidth=thick)
        axes.plot(series.x, series.y, color=colour, label=series.label, markersize=4, **how)
    if panel.has_dots:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    else:
        axes.ticklabel_format(useOffset=False)
    axes.set_xlim(*_span(panel))
    _draw_marks(axes, marks, styles, colours)
    _draw_caps(axes, panel.series, styles, colours)


def _draw_marks(axes: Axes, marks: Marks, styles: dict[str, int], colours: Colours) -> None:
    """A thin line at each end of a clip range, with its number above the axes."""
    above = dict(xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="baseline")
    for mark, (label, line) in marks.items():
        colour = _colour(styles[label], colours)
        axes.axvline(mark, color=colour, linewidth=0.8, alpha=0.75)
        where = (0, 72 * (0.04 + MARK * line))
        axes.annotate(_number(mark), (mark, 1), where, color=colour, size=MARK_SIZE, **above)


def _draw_caps(axes: Axes, series: Sequence[Series], styles: dict[str, int], colours: Colours) -> None:
    """To the right of the axes, the value at which a line stays."""
    by_value = {f"{s.cap:.4g}": s for s in reversed([*series]) if s.cap is not None}
    low, high = axes.get_ylim()
    ends = sorted(
        (HEIGHT * (one.y[-1] - low) / (high - low), one.cap, value) for value, one in by_value.items()
    )
    places = spread([end for end, *_ in ends], CAP, 0.0, HEIGHT)
    for (_, _, value), place in zip(ends, places, strict=True):
        text = dict(size=CAP_SIZE, weight="bold", va="center", transform=axes.transAxes)
        colour = _colour(styles[by_value[value].label], colours)
        axes.text(1.01, place / HEIGHT, f"→ {value}", color=colour, **text)


def _draw_bars(axes: Axes, panel: Panel, styles: dict[str, int], colours: Colours) -> None:
    width, numbers = 0.8 / len(styles), len(panel.categories) * len(panel.series)
    for series in panel.series:
        i = styles[series.label]
        left = [x - 0.4 + width * (i + 0.5) for x in series.x]
        bars = axes.bar(left, series.y, width * 0.92, color=_colour(i, colours), label=series.label)
        if numbers <= MOST_NUMBERS:
            turned = 90 if numbers > MOST_UPRIGHT else 0
            axes.bar_label(bars, fmt="%.2g", size=7.5, color=colours.ink, padding=2, rotation=turned)
    axes.set_xticks(range(len(panel.categories)), panel.categories)
    if numbers > MOST_NUMBERS and not any(y for series in panel.series for y in series.y):
        axes.text(0.5, 0.55, "0 for all", color=colours.ink, size=9, ha="center", transform=axes.transAxes)


def _marks(panel: Panel, first: float, last: float, wide: float) -> Marks:
    """Each mark within axes of this width once: the first series that has it, and the line of its number.

    A number stands on the lowest line on which it is clear of the numbers to its left.
    """
    owners = {mark: s.label for s in reversed(panel.series) for mark in s.marks if first < mark < last}
    found, ends = Marks(), list[float]()
    for mark, label in sorted(owners.items()):
        half = len(_number(mark)) * LETTER * MARK_SIZE / 72 / 2
        at = wide * (mark - first) / (last - first)
        line = next((i for i, end in enumerate(ends) if end + GAP <= at - half), len(ends))
        ends[line : line + 1] = [at + half]
        found[mark] = (label, line)
    return found


def spread(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """The places nearest to those `wanted`, in ascending order, with at least this distance between them."""
    blocks = list[list[float]]()  # of places that touch; a block stands where it is nearest to all of its own
    for i, place in enumerate(wanted):
        blocks.append([place - i * distance])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    starts = [fmean(block) for block in blocks for _ in block]
    highest = high - distance * (len(wanted) - 1)
    return [max(low, min(start, highest)) + i * distance for i, start in enumerate(starts)]


def _number(mark: float) -> str:
    return f"{mark:.{5 if abs(mark - 1) < CLOSE_TO_1 else 3}g}"


def _wrapped(text: str, size: float, wide: float) -> str:
    """A text in lines of at most this many inches."""
    return textwrap.fill(text, int(wide * 72 / (LETTER * size)))


def _span(panel: Panel) -> tuple[float, float]:
    return min(s.x[0] for s in panel.series), max(s.x[-1] for s in panel.series)


def _colour(i: int, colours: Colours) -> str:
    return colours.lines[i % len(colours.lines)]
