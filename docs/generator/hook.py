"""The hook of mkdocs.yml: gather the pages of the site, and make those of the catalogue."""

import re
from typing import Any

from docs.generator import laws, losses, names, pages, plots
from docs.generator.written import ROOT

CELL = re.compile(r"<td.*?</td>", re.DOTALL)
TEXT = re.compile(r">[^<]+<")  # between two tags
LONG = re.compile(r"[^\s<>]{15,}")
MARK = re.compile(r"(?<=[A-Za-z)\]])([._/=:(@]+)(?=[A-Za-z'\"])|(?<=[a-z]{3})(?=[A-Z])")


def on_config(config: Any) -> Any:
    """Write every page below build/site-source, which mkdocs then reads, and list the losses in `nav`."""
    out = ROOT / "build" / "site-source"
    made = losses.pages() | names.pages() | laws.pages()
    pages.write(out, made, plots.files())
    config.docs_dir = str(out)
    (section,) = [entry for entry in config.nav if "Losses" in entry]
    section["Losses"] += losses.navigation()
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Let the long names in a table's cells wrap after a dot, an underscore, a slash, or before a capital."""
    return CELL.sub(lambda cell: TEXT.sub(_breakable, cell[0]), html)


def _breakable(text: re.Match[str]) -> str:
    return LONG.sub(lambda word: MARK.sub(r"\g<0><wbr>", word[0]), text[0])
