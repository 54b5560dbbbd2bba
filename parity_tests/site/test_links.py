"""Nothing of a page is loaded from elsewhere, and each loss has its formula. mkdocs checks the links."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from fontTools.ttLib import TTFont

from composer_plugins.losses.registry import losses
from docs.generator.names import anchor

LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """The ids, the formulas and the loaded addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads, self.ids = set[str](), set[str]()
        self.formulas, self.symbols, self.in_formula = 0, set[str](), False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.formulas += tag == "math"
        self.in_formula |= tag == "math"
        self.symbols |= {"√"} if tag == "msqrt" else set()
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag in LOADED and LOADED[tag] in values:
            self.loads.add(values[LOADED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self.in_formula &= tag != "math"

    def handle_data(self, data: str) -> None:
        self.symbols |= {*data} if self.in_formula else set()


page = cache(Page)


def test_nothing_of_a_page_is_loaded_from_elsewhere(site: Path) -> None:
    found = {
        f"{file.relative_to(site)}: {address}"
        for file in site.rglob("*.html")
        for address in page(file).loads
        if address.startswith(("http:", "https:", "//"))
    }
    found |= {
        f"{file.relative_to(site)}: {line[:80]}"
        for file in site.rglob("*.css")
        for line in file.read_text().split("}")
        if "url(http" in line or "@import" in line
    }
    assert not found, "\n".join(sorted(found)[:20])


def test_every_loss_has_a_page_with_its_formula(site: Path) -> None:
    for loss in losses():
        found = page(site / "losses" / loss.kind / f"{loss.name}.html")
        assert found.formulas == len(loss.tex.strip().splitlines()) > 0, loss.name
        for dialect in loss.dialects:
            assert anchor(loss, dialect) in found.ids, f"{loss.name}@{dialect.upstream}"


def test_the_font_of_formulas_has_each_of_their_characters(site: Path) -> None:
    """Without √ in it a root is drawn as nothing, and another font's sum is too small."""
    characters = TTFont(site / "docs/generator/formulas.woff").getBestCmap()
    wanted = set[str]().union(*(page(file).symbols for file in site.rglob("*.html")))
    assert len(wanted) > 60 and "√" in wanted
    missing = {one for one in wanted if ord(one) not in characters and not one.isspace()}
    assert not missing, missing
