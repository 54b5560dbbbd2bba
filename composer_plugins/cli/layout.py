"""Lines for a terminal of any width: nothing is cut off, and no number or word is broken without need.

A line breaks at a blank. A word that is wider than its column, such as the path of a test, breaks after a
"::", "/" or "_" of it. Columns that do not fit beside each other stand below each other.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

GAP = 2  # blanks between two columns
LEAST = 30  # a column of prose is at least this wide beside others; else it stands below them
WIDEST = 100  # prose is not easier to read in longer lines
JOINTS = ("::", "/", "_", ",", "-")  # the first that there is


class Column(NamedTuple):
    """A heading, and a cell for each row."""

    heading: str
    cells: Sequence[str]
    style: str = ""
    right: bool = True

    @property
    def width(self) -> int:
        """The cells that its widest text takes."""
        return max(map(cell_len, (self.heading, *self.cells)))


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text; a longer word is broken at a joint."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *pieces, line = _pieces(word, width)
        lines += pieces
    return [*lines, line]


def _pieces(word: str, width: int) -> Iterator[str]:
    width = max(width, 1)
    while cell_len(word) > width:
        start = word[:width]
        ends = (start.rfind(joint) + len(joint) for joint in JOINTS if joint in start)
        end = next(ends, width)
        yield word[:end]
        word = word[end:]
    yield word


def indented(lines: Iterable[Text], by: int = 2) -> list[Text]:
    """The lines, each with blanks in front of it."""
    return [Text(" " * by) + line for line in lines]


def facts(rows: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """A label and a text to each row."""
    return entries([(label, "", text) for label, text in rows], width)


def entries(rows: Sequence[tuple[str, str, str]], width: int) -> list[Text]:
    """A name, a short text and a long one to each row; the long one is below them where there is no room."""
    if not rows:
        return []
    widths = [max(cell_len(row[i]) for row in rows) for i in (0, 1)]
    left = sum(one + GAP for one in widths if one)
    if width - left < LEAST and any(len(row[2]) > width - left for row in rows):
        return [line for row in rows for line in _stacked(row, width)]
    lines = []
    for name, short, long in rows:
        head = Text(_padded(name, widths[0]), style="dim")
        if widths[1]:
            head = head + Text(_padded(short, widths[1]), style="none")
        for text in wrapped(long, width - left):
            lines.append(head + Text(text, style="none"))
            head = Text(" " * left)
    return lines


def _stacked(row: tuple[str, str, str], width: int) -> Iterator[Text]:
    name, short, long = row
    head = [Text(name, style="dim"), *map(Text, wrapped(short, width - 4) if short else ())]
    if cell_len(name) + GAP + cell_len(short) <= width and short:
        yield head[0] + Text(" " * GAP + short, style="none")
    else:
        yield head[0]
        yield from indented(head[1:], 4)
    yield from indented(map(Text, wrapped(long, width - 4)), 4)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text) + GAP)


def tables(
    label: Column, sections: Sequence[Sequence[Column]], width: int, name: str = ""
) -> Iterator[list[Text]]:
    """The columns of all sections as one table; where they do not fit, as one or more to each section.

    Every table begins with the column `label`. `name` is its heading in the tables of the sections but the
    last, whose heading is its own.
    """
    every = [column for section in sections for column in section]
    if _width(label, every) <= width:
        yield _table(label, every)
        return
    for i, section in enumerate(sections):
        shown = label._replace(heading=name) if i + 1 < len(sections) else label
        group: list[Column] = []
        for column in section:
            if group and _width(label, [*group, column]) > width:
                yield _table(shown, group)
                group = []
            group.append(column)
        if group:
            yield _table(shown, group)


def _width(label: Column, columns: Sequence[Column]) -> int:
    return label.width + sum(GAP + column.width for column in columns)


def _table(label: Column, columns: Sequence[Column]) -> list[Text]:
    lines = []
    for i in range(-1, len(label.cells)):
        line = Text()
        for column in (label._replace(right=False), *columns):
            text, style = (column.heading, "bold") if i < 0 else (column.cells[i], column.style)
            blanks = " " * (column.width - cell_len(text))
            line.append(blanks if column.right else "")
            line.append(text, style=style)
            line.append(("" if column.right else blanks) + " " * GAP)
        line.rstrip()
        lines.append(line)
    return lines


def prose(text: str, width: int) -> list[Text]:
    """A docstring: its paragraphs are filled anew, and its indented lines, which are formulas, are kept."""
    width, lines, paragraph = min(width, WIDEST), list[str](), list[str]()

    def fill() -> None:
        if paragraph:
            hang = "  " if paragraph[0].startswith("- ") else ""
            first, *rest = wrapped(" ".join(paragraph), width - len(hang))
            lines.extend([first, *(hang + line for line in rest)])
            paragraph.clear()

    for line in inspect.cleandoc(text).splitlines():
        word = line.partition(" ")[0]
        is_listed = bool(paragraph) and paragraph[0].startswith("- ")
        is_formula = line.startswith(" ") and not is_listed
        is_heading = word.endswith(":") and word[0].isupper()  # "Source: ..."
        if not line or is_formula or is_heading or word == "-":
            fill()
        if not line:
            lines.append("")
        elif is_formula:
            indent = len(line) - len(line.lstrip())
            first, *rest = wrapped(line.lstrip(), width - indent - 4)
            lines += [" " * indent + first, *(" " * (indent + 4) + one for one in rest)]
        else:
            paragraph.append(line.strip())
    fill()
    return [Text(line) for line in lines]
