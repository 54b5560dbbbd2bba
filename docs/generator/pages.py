"""The pages of the repository as the site's sources: the same folders, so that relative links stay true.

A link to a file that is not a page, as to a module or a config, leads to a page that shows the file.
"""

import re
import shutil
from collections.abc import Mapping, Set
from os.path import normpath
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from docs.generator import formulas
from docs.generator.written import ROOT

PAGES = (
    "docs/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "kernels/README.md",
    "benchmarks/README.md",
    "parity_tests/README.md",
    "parity_tests/divergences.md",
    "parity_tests/golden/README.md",
    "recipes/*/README.md",
)
ASSETS = ("docs/*.png", "docs/*.svg", "docs/*.ipynb", "docs/generator/*.css", "docs/generator/*.js")
BADGE = "https://img.shields.io/"
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def write(out: Path, made: Mapping[str, str]) -> None:
    """Fill `out` with the pages of the repository, those `made`, and what they link to."""
    texts = {file: (ROOT / file).read_text() for file in found(PAGES)}
    texts["index.md"] = home()
    texts |= made
    shown: dict[str, str] = {}
    assets = found(ASSETS)
    on_the_site = {*texts, *assets}
    for file, text in texts.items():
        texts[file] = LINK.sub(lambda link, file=file: _target(file, link[1], on_the_site, shown), text)
    for file, text in (texts | shown).items():
        path = out / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for file in assets:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, out / file)
    font = formulas.font(out, texts.values())
    kept = {*texts, *shown, *assets, font}
    for path in out.rglob("*"):  # pages of an earlier build
        if path.is_file() and path.relative_to(out).as_posix() not in kept:
            path.unlink()


def home() -> str:
    """README.md as the first page of the site, without a menu and without its badges, which a server has."""
    lines = (ROOT / "README.md").read_text().splitlines(keepends=True)
    return "---\nhide: [navigation, toc]\n---\n\n" + "".join(line for line in lines if BADGE not in line)


def found(patterns: tuple[str, ...]) -> list[str]:
    """The files that match, relative to the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def _target(file: str, link: str, on_the_site: Set[str], shown: dict[str, str]) -> str:
    """The link, or where it leads to a file that is not a page, the link to the page that shows it."""
    target = normpath(Path(file).parent / link)
    path = ROOT / target
    if target in on_the_site or not path.exists():
        return link  # a page, an asset, or nothing at all, which mkdocs reports
    if path.is_dir() and f"{target}/README.md" in on_the_site:
        return f"{link.rstrip('/')}/README.md"
    if f"{target}.md" not in shown:
        shown[f"{target}.md"] = source_page(target)
    return f"{link.rstrip('/')}.md"


def source_page(target: str) -> str:
    """A page with the text of a file, or of each file in a folder; line 12 of a file is at #line-12."""
    path = ROOT / target
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    # As HTML, so that mkdocs sees the anchors and can check links to a line.
    form = HtmlFormatter(linenos="inline", linespans="line", cssclass="highlight", wrapcode=True)
    blocks = [f"---\nsearch:\n  exclude: true\n---\n\n# {path.name}"]
    for one in files:
        text = highlight(one.read_text(), get_lexer_for_filename(one.name), form)
        blocks.append(f"`{one.relative_to(ROOT).as_posix()}`\n\n{text}")
    return "\n\n".join(blocks)
