"""Nothing of a page is loaded from elsewhere, and each loss has its formula. mkdocs checks the links."""

import re
import tomllib
from functools import cache
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path

from fontTools.ttLib import TTFont

from composer_plugins import __version__
from composer_plugins.losses.registry import losses
from docs.generator.names import anchor
from docs.generator.tex import tex
from parity_tests.rigs.paths import ROOT

# What a page or a style sheet loads from another host.
ELSEWHERE = re.compile(
    r"""<(?:img|script|source|iframe)\s[^>]*src=["']?(?:https?:)?//[^>]*"""
    r"""|<link\s[^>]*href=["']?(?:https?:)?//[^>]*|url\(["']?http[^)]*|@import[^;]*"""
)


class Page(HTMLParser):
    """The ids and the formulas of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.symbols = set[str](), set[str]()
        self.formulas, self.in_formula = 0, False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.formulas += tag == "math"
        self.in_formula |= tag == "math"
        self.symbols |= {"√"} if tag == "msqrt" else set()
        self.ids |= {values[name] for name in ("id", "name") if name in values}

    def handle_endtag(self, tag: str) -> None:
        self.in_formula &= tag != "math"

    def handle_data(self, data: str) -> None:
        self.symbols |= {*data} if self.in_formula else set()


page = cache(Page)


def test_nothing_of_a_page_is_loaded_from_elsewhere(site: Path) -> None:
    found = {
        f"{file.relative_to(site)}: {loaded[:80]}"
        for file in site.rglob("*")
        if file.suffix in (".html", ".css")
        for loaded in ELSEWHERE.findall(file.read_text())
    }
    assert not found, "\n".join(sorted(found)[:20])


def test_every_loss_has_a_page_with_its_formula(site: Path) -> None:
    for loss in losses():
        found = page(site / "losses" / loss.kind / f"{loss.name}.html")
        assert found.formulas == len(tex(loss).strip().splitlines()) > 0, loss.name
        for dialect in loss.dialects:
            assert anchor(loss, dialect) in found.ids, f"{loss.name}@{dialect.upstream}"


def test_the_font_of_formulas_has_each_of_their_characters(site: Path) -> None:
    """Without √ in it a root is drawn as nothing, and another font's sum is too small."""
    characters = TTFont(site / "docs/generator/formulas.woff").getBestCmap()
    wanted = set[str]().union(*(page(file).symbols for file in site.rglob("*.html")))
    assert len(wanted) > 60 and "√" in wanted
    missing = {one for one in wanted if ord(one) not in characters and not one.isspace()}
    assert not missing, missing


def test_every_page_has_the_version_the_licence_and_the_repository(site: Path) -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    (address,) = re.findall(r"^repo_url: (\S+)$", config, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = f'composer-plugins {__version__} · {project["license"]} · <a href="{address}">Repository</a>'
    header = rf'class="md-source">.*?{re.escape(__version__)}.*?{project["license"]}'
    for file in site.rglob("*.html"):
        text = file.read_text()
        assert about in text and re.search(header, text, re.DOTALL), file
    assert f"git clone {address}\n" in re.sub("<[^>]*>", "", (site / "docs/get_started.html").read_text())


def test_the_menu_has_every_page_of_the_navigation(site: Path) -> None:
    """A README, which mkdocs takes for the index of its section, is an entry as the others are."""
    config = (ROOT / "mkdocs.yml").read_text()
    wanted = re.findall(r"^ +- .*: (\S+)\.md$", config, re.MULTILINE)
    menu = (site / "docs/get_started.html").read_text().split('<nav class="md-nav md-nav--primary')[1]
    links = set(re.findall(r'<a href="([^"#]+)\.html" class="md-nav__link', menu))
    places = {normpath(f"docs/{link}") for link in links} | {"docs/get_started"}
    assert len(wanted) > 30
    assert not {one.replace("README", "index") for one in wanted} - places
