"""Tables of the documentation that a program writes, each between two marks."""

from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def filled(page: Path, tables: Mapping[str, Callable[[], str]]) -> str:
    """The text of a page with these tables made anew, each between its two marks."""
    text = page.read_text()
    for name, make in tables.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        before, _, after = text.partition(start)
        text = f"{before}{start}{make()}\n{end}{after.partition(end)[2]}"
    return text
