"""Tables and texts for a terminal of any width, drawn by rich: nothing is cut off.

A line breaks at a blank. A word that is wider than its column, such as the path of a test, breaks after a
"::", "/" or "_" of it. Columns that do not fit beside each other stand below each other.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

BLANK = Text(" ")  # an empty line
GAP = 2  # blanks between two columns
INDENT = 4  # of what stands below a row
LEAST = 30  # a column of prose is at least this wide beside others; else it stands below them
WIDEST = 100  # prose is not easier to read in longer lines
JOINTS = ("::", "/", "_", ",", "-")  # the first that there is
# Of a docstring: an item of a list, a line of a formula, a paragraph, or an empty line.
BLOCK = re.compile(r"^(- .*(?:\n  .*)*| .*|.+(?:\n(?! |- |[A-Z]\w*: ).+)*|)$", re.MULTILINE)


class Column(NamedTuple):
    """A heading, and a cell for each row."""

    heading: str
    cells: Sequence[str | Text]
    style: str = ""
    right: bool = False
    is_text: bool = False  # it may be wrapped, or stand below the others

    @property
    def width(self) -> int:
        """The cells that its widest text takes."""
        return max(cell_len(str(text)) for text in (self.heading, *self.cells))


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


def show(console: Console, parts: Iterable[RenderableType], indent: int = 0) -> None:
    """Print lines and tables, each with blanks in front of it."""
    for part in indented(parts, indent):
        console.print(part, overflow="fold")


def indented(parts: Iterable[RenderableType], by: int) -> Iterator[RenderableType]:
    """Yield lines and tables with blanks in front of them."""
    yield from (Padding(part, (0, 0, 0, by), expand=False) for part in parts)


def records(
    columns: Sequence[Column], width: int, *, headings: bool = True, least: int = LEAST
) -> Iterator[RenderableType]:
    """Yield the rows of a table. Where columns of texts have no room, the last ones stand below each row.

    A column of texts is narrower than its widest text only where it has at least `least` columns.
    """
    columns = [column for column in columns if column.width]
    texts = [column for column in columns if column.is_text]
    room = width - sum(column.width + GAP for column in columns if not column.is_text)
    beside = list(texts)
    while beside and _width(beside) > room and _share(beside, room) < least:
        beside.pop()
    is_whole = _width(beside) <= room
    below = texts[len(beside) :]
    shown = [one for one in columns if one not in below]
    sizes = [one.width if is_whole or not one.is_text else _share(beside, room) for one in shown]
    grid = _grid(shown, sizes)
    if headings:
        grid.add_row(*(Text(one.heading, style="bold") for one in shown))
    for i in range(len(columns[0].cells) if columns else 0):
        grid.add_row(*(_cell(one, i, size) for one, size in zip(shown, sizes, strict=True)))
        if filled := [one for one in below if str(one.cells[i])]:
            yield grid
            grid = _grid(shown, sizes)
            labels = Column("", [one.heading for one in filled], "dim")
            values = Column("", [one.cells[i] for one in filled], is_text=True)
            own = records([labels, values], width - INDENT, headings=False, least=1)
            yield from indented(own, INDENT)
    if grid.rows:
        yield grid


def _grid(columns: Sequence[Column], sizes: Sequence[int]) -> Table:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for column, size in zip(columns, sizes, strict=True):
        grid.add_column(justify="right" if column.right else "left", width=size, overflow="fold")
    return grid


def _cell(column: Column, i: int, size: int) -> Text:
    cell = column.cells[i]
    style = cell.style if isinstance(cell, Text) else column.style
    return Text("\n".join(wrapped(str(cell), size)) if column.is_text else str(cell), style=style)


def _share(texts: Sequence[Column], room: int) -> int:
    """The width of each column of texts where they share the room."""
    return max((room + GAP) // len(texts) - GAP, 1)


def entries(rows: Iterable[tuple[str, ...]], width: int) -> Iterator[RenderableType]:
    """Names and a text to each row; the texts are below the names where there is no room."""
    columns = [Column("", cells) for cells in zip(*rows, strict=True)]
    columns[:1] = [column._replace(style="dim") for column in columns[:1]]
    columns[-1:] = [column._replace(is_text=True) for column in columns[-1:]]
    return records(columns, width, headings=False)


def tables(
    label: Column, sections: Sequence[Sequence[Column]], width: int, name: str = ""
) -> list[RenderableType]:
    """The columns of all sections as one table; where they do not fit, as one or more to each section.

    Every table begins with the column `label`. `name` is its heading in the tables of the sections but the
    last, whose heading is its own. An empty line is between two tables.
    """
    every = [column for section in sections for column in section]
    if _width([label, *every]) <= width:
        return [*records([label, *every], width)]
    groups: list[list[Column]] = []
    for section in sections:
        shown = label if section is sections[-1] else label._replace(heading=name)
        for i, column in enumerate(section):
            if i and _width([*groups[-1], column]) <= width:
                groups[-1].append(column)
            else:
                groups.append([shown, column])
    parts = [part for group in groups for part in (BLANK, *records(group, width))]
    return parts[1:]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


def prose(text: str, width: int) -> Iterator[Text]:
    """A docstring: its paragraphs are filled anew, and its indented lines, which are formulas, are kept."""
    width = min(width, WIDEST)
    for block in BLOCK.findall(inspect.cleandoc(text)):
        indent = len(block) - len(block.lstrip())
        hang = indent + 4 if indent else 2 * block.startswith("- ")
        words = block.lstrip() if indent else " ".join(block.split())
        first, *rest = wrapped(words, width - hang)
        yield from (
            Text(line) if line else BLANK
            for line in (" " * indent + first, *(" " * hang + one for one in rest))
        )
