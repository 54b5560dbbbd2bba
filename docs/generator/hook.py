"""The hook of mkdocs.yml: gather the pages of the site, and make those of the catalogue."""

import re
import tomllib
from fnmatch import fnmatch
from itertools import cycle
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from composer_plugins import __version__
from docs.generator import laws, losses, names, pages, plots
from docs.generator.written import ROOT

SEARCH = yaml.safe_load((ROOT / "docs/generator/search.yml").read_text())
LICENCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
TEXT = re.compile(r">[^<]+<")  # between two tags
LEAST_COLUMNS, LEAST_TEXT = 4, 80  # of a table that is a list of rows on a phone; characters in a row
LONG = re.compile(r"[^\s<>]{15,}")
MARK = re.compile(r"(?<=[A-Za-z)\]])([._/=:(@]+)(?=[A-Za-z'\"])|(?<=[a-z]{3})(?=[A-Z])")
NUMBER = re.compile(r"\b\d[\d.]*e-\d+")  # a line would end at its hyphen


def on_config(config: Any) -> Any:
    """Write every page below build/site-source, which mkdocs then reads, and list the losses in `nav`."""
    plots.start()
    out = ROOT / "build" / "site-source"
    made = losses.pages() | names.pages() | laws.pages()
    pages.write(out, made)
    config.docs_dir = str(out)
    (section,) = [entry for entry in config.nav if "Losses" in entry]
    section["Losses"] += losses.navigation()
    config.extra |= {"release": __version__, "licence": LICENCE}
    about = f"composer-plugins {__version__} · {LICENCE}"
    config.copyright = f'{about} · <a href="{config.repo_url}">Repository</a>'
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures, which other processes draw while mkdocs reads the pages."""
    for name, path in plots.files().items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    if unknown := [name for name in SEARCH["words"] if name not in files.src_uris]:
        raise PluginError(f"docs/generator/search.yml has words for pages that do not exist: {unknown}")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give the page what the search knows of it."""
    file = page.file.src_uri
    boost = next((value for name, value in SEARCH["boost"].items() if fnmatch(file, name)), 1)
    page.meta.setdefault("search", {"boost": boost})
    page.meta.setdefault("tags", SEARCH["words"].get(file, []))
    return markdown


def on_env(env: Any, **_: Any) -> Any:
    """Wait for the pictures, because mkdocs copies files next."""
    plots.finish()
    return env


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables wrap at their marks and capitals, and label the cells of a table of texts."""
    return TABLE.sub(_labelled, CELL.sub(lambda cell: TEXT.sub(_breakable, cell[0]), html))


def _labelled(table: re.Match[str]) -> str:
    """In a table with much text in its rows, the heading of each cell, which site.css shows on a phone."""
    headings = [TAG.sub("", one).replace('"', "&quot;") for one in HEADING.findall(table[0])]
    if len(headings) < LEAST_COLUMNS or len(TAG.sub("", table[0])) < LEAST_TEXT * table[0].count("<tr>"):
        return table[0]
    named = cycle(headings)
    return re.sub("<td", lambda _: f'<td data-label="{next(named)}"', table[0])


def _breakable(text: re.Match[str]) -> str:
    broken = LONG.sub(lambda word: MARK.sub(r"\g<0><wbr>", word[0]), text[0])
    return NUMBER.sub(r'<span class="number">\g<0></span>', broken)
