"""A picture in the terminal: lines of braille dots, bars of blocks, and a letter for each loss.

The letters tell lines apart where there are no colours: in a log, or to a colour-blind reader.
"""

import math
import string
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

from rich.text import Text

from composer_plugins.errors import ConfigError
from composer_plugins.plotting.data import Heights, Panel, Picture, Series, heights

NARROWEST, WIDEST, ROWS = 36, 64, 11  # of a panel, in cells
GUTTER, GAP = 10, 2
NUMBER = GUTTER - 2  # characters of a number
COLOURS = ("bright_blue", "dark_orange", "green", "magenta", "yellow", "cyan", "white")
LONG = 1e6  # an axis of this length has no room for the digits of its numbers
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille cell, by column and row
LETTERS_AT = (0.15, 0.62, 0.9)  # along the axis


def render(picture: Picture, width: int) -> Text:
    """The picture as text, with as many panels side by side as `width` has room for; it has at least one."""
    width = max(width, NARROWEST)
    labels, most = picture.labels, len(string.ascii_letters)
    if len(labels) > most:
        problem = f"a picture in text tells {most} lines apart, and this has {len(labels)}"
        raise ConfigError("plot", problem, "name fewer losses")
    letters = dict(zip(labels, string.ascii_letters, strict=False))
    columns = max(1, min(picture.columns, (width + GAP) // (NARROWEST + GAP)))
    each = min(WIDEST, (width - GAP * (columns - 1)) // columns)
    lines = [*(Text(line, style="bold") for line in wrap(picture.title, width)), Text()]
    for label, letter in letters.items():
        named = wrap(label, width, initial_indent=f"{letter}  ", subsequent_indent="   ")
        lines += [Text(line, style=_colour(letters, label)) for line in named]
    panels = [_panel(*one, letters, each) for one in zip(picture.panels, heights(picture), strict=True)]
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        lines.append(Text())
        lines += [_beside(parts, each) for parts in zip_longest(*row, fillvalue=Text())]
    lines.append(Text())
    lines += [Text(line, style="dim") for note in picture.notes for line in wrap(note, width)]
    return Text("\n").join(lines)


def _panel(panel: Panel, bounds: Heights, letters: dict[str, str], width: int) -> list[Text]:
    draw = _bars if panel.categories else _lines
    head = [Text(line, style="bold") for one in (panel.title, panel.y_label) for line in wrap(one, width)]
    return [*head, *draw(panel, bounds, letters, width)]


def _lines(panel: Panel, bounds: Heights, letters: dict[str, str], width: int) -> list[Text]:
    columns = width - GUTTER
    low, high = bounds
    first, last = panel.series[0].x[0], panel.series[0].x[-1]
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    named: dict[tuple[int, int], str] = {}
    for i, series in enumerate(panel.series):
        dots = [
            _dot(series, first + (last - first) * c / (2 * columns - 1), low, high)
            for c in range(2 * columns)
        ]
        for column, (before, now) in enumerate(zip([dots[0], *dots], dots, strict=False)):
            # A jump is a vertical line from one dot to the next.
            for dot in range(min(before, now), max(before, now) + 1):
                if 0 <= dot < 4 * ROWS:
                    place = (dot // 4, column // 2)
                    bits = cells.get(place, (0, ""))[0] | DOTS[column % 2][dot % 4]
                    cells[place] = (bits, series.label)
        for at in LETTERS_AT:
            column = min(int((at + 0.05 * i) * columns), columns - 1)
            if 0 <= dots[2 * column] < 4 * ROWS:
                named.setdefault((dots[2 * column] // 4, column), series.label)
    found = []
    for row in range(ROWS):
        tick = _number(high - (high - low) * row / (ROWS - 1), high - low) if row % (ROWS // 2) == 0 else ""
        line = Text(f"{tick:>{NUMBER}} {'┤' if tick else '│'}")
        for column in range(columns):
            if label := named.get((row, column)):
                line.append(letters[label], style=f"bold {_colour(letters, label)}")
            else:
                bits, label = cells.get((row, column), (0, ""))
                line.append(chr(0x2800 + bits) if bits else " ", style=_colour(letters, label))
        found.append(line)
    return [*found, *_below(panel, letters, first, last, columns)]


def _dot(series: Series, x: float, low: float, high: float) -> int:
    """The row of dots at which a line stands at this x, from the top."""
    i = min(max(bisect_right(series.x, x), 1), len(series.x) - 1)
    x0, x1, y0, y1 = series.x[i - 1], series.x[i], series.y[i - 1], series.y[i]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return round((high - y) / (high - low) * (4 * ROWS - 1))


def _below(panel: Panel, letters: dict[str, str], first: float, last: float, columns: int) -> Iterator[Text]:
    """The axis with its two ends and its name, and what the marks and caps of the lines are."""
    yield Text(" " * (GUTTER - 1) + "└" + "─" * columns)
    left, right = f"{first:.5g}", f"{last:.5g}"
    yield Text(" " * GUTTER + left + right.rjust(columns - len(left)))
    for line in wrap(panel.x_label, columns):
        yield Text(" " * GUTTER + line)
    marks: dict[float, str] = {}
    for series in panel.series:
        for mark in series.marks:
            marks[mark] = marks.get(mark, "") + letters[series.label]
    facts = [f"{mark:.5g} ({who})" for mark, who in sorted(marks.items())]
    sentences = [f"marks: {', '.join(facts)}"] if facts else []
    sentences += [f"{letters[s.label]} stays at {s.cap:.4g}" for s in panel.series if s.cap is not None]
    for sentence in sentences:
        for line in wrap(sentence, columns):
            yield Text(" " * GUTTER + line, style="italic")


def _bars(panel: Panel, bounds: Heights, letters: dict[str, str], width: int) -> list[Text]:
    low, high = bounds
    room = width - GUTTER - NUMBER - 3  # a letter, a number, and blanks
    scale = room / (high - low)
    zero = round(-low * scale)
    found = [Text(panel.x_label, style="italic")]
    for i, category in enumerate(panel.categories):
        for j, series in enumerate(panel.series):
            y, style = series.y[i], _colour(letters, series.label)
            length = round(abs(y) * scale)
            start = zero if y >= 0 else max(zero - length, 0)
            line = Text(f"{category if j == 0 else '':>{GUTTER - 2}} ")
            line.append(f"{letters[series.label]} ", style=style)
            line.append(" " * start + "█" * length or "|", style=style)
            line.append(f" {_written(y, 3)}")
            found.append(line)
    return found


def _number(value: float, span: float) -> str:
    """A number with as many digits as an axis of this length can show."""
    decimals = 2 - math.floor(math.log10(span))
    return _written(round(value, decimals if span > LONG else max(0, decimals)), 7)


def _written(value: float, digits: int) -> str:
    """A number with these digits, or fewer where it would be too long: -4.6e+29."""
    texts = [f"{value + 0.0:.{most}g}" for most in range(digits, 0, -1)]  # + 0.0: not -0
    return next((text for text in texts if len(text) <= NUMBER), texts[-1])


def _beside(parts: Sequence[Text], width: int) -> Text:
    line = Text()
    for part in parts[:-1]:
        line.append_text(part)
        line.append(" " * (width - part.cell_len + GAP))
    line.append_text(parts[-1])
    return line


def _colour(letters: dict[str, str], label: str) -> str:
    return COLOURS[list(letters).index(label) % len(COLOURS)] if label in letters else ""
