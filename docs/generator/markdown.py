"""Small pieces of Markdown that the made pages share."""

import html
from collections.abc import Iterable, Sequence
from functools import cache

from docs.generator.written import ROOT

ESCAPES = {ord(mark): f"\\{mark}" for mark in "*_[]"}


def cell(text: object) -> str:
    """A text as one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 99) -> str:
    """A table; columns from `numbers_from` on are aligned to the right."""
    rule = ["---:" if i >= numbers_from else "---" for i in range(len(head))]
    lines = [head, rule, *([cell(one) for one in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """A text of the catalogue, in which nothing is markup but the code between backticks."""
    parts = text.split("`")
    parts[::2] = [html.escape(one, quote=False).translate(ESCAPES) for one in parts[::2]]
    return "`".join(parts)


def paper(text: str) -> str:
    """A paper as the catalogue writes it, as a link where it has an address."""
    words = text.split()
    if text.startswith("arXiv "):
        return f"[{text}](https://arxiv.org/abs/{words[1].rstrip(',;')})"
    if "doi" in words:
        return f"[{text}](https://doi.org/{words[words.index('doi') + 1]})"
    if text.startswith(("http://", "https://")):
        return f"<{text}>"
    address = text.removeprefix("no paper: ")
    if " " not in address and "/" in address:
        host = "" if "." in address.split("/")[0] else "github.com/"
        return text.replace(address, f"[{address}](https://{host}{address})")
    return plain(text)


def proof(text: str, up: str) -> str:
    """A proof as a link to its line of the test's file; `up` leads from the page to the repository."""
    file, separator, test = text.partition("::")
    if not separator:
        return plain(text)
    return f"[`{test}`]({up}parity_tests/{file}#line-{_line(file, test)})"


@cache
def _line(file: str, test: str) -> int:
    lines = (ROOT / "parity_tests" / file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {test.partition('[')[0]}("))
