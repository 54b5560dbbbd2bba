"""The pages of the repository as the site's sources: the same folders, so that relative links stay true.

A link to a file that is not a page, as to a module or a config, leads to a page that shows the file.
"""

import re
import shutil
from collections.abc import Mapping
from os.path import normpath
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from docs.generator import formulas
from docs.generator.written import ROOT

# `README.md` of the repository is not a page: `docs/generator/home.md` is the first page of the site.
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
ASSETS = ("docs/*.png", "docs/*.svg", "docs/generator/*.css", "docs/generator/*.js")
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def write(out: Path, made: Mapping[str, str], drawn: Mapping[str, Path]) -> None:
    """Fill `out` with the pages of the repository, those `made`, what they link to, and what is `drawn`."""
    texts = {file: (ROOT / file).read_text() for file in found(PAGES)}
    texts["index.md"] = (ROOT / "docs/generator/home.md").read_text()
    texts |= made
    shown: dict[str, str] = {}
    for file, text in texts.items():
        texts[file] = LINK.sub(lambda link, file=file: _target(file, link[1], texts, shown), text)
    for file, text in (texts | shown).items():
        path = out / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    assets = {file: ROOT / file for file in found(ASSETS)} | drawn
    for file, source in assets.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, out / file)
    font = formulas.font(out, texts.values())
    kept = {*texts, *shown, *assets, font}
    for path in out.rglob("*"):  # pages of an earlier build
        if path.is_file() and path.relative_to(out).as_posix() not in kept:
            path.unlink()


def found(patterns: tuple[str, ...]) -> list[str]:
    """The files that match, relative to the repository."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if "__pycache__" not in path.parts
    )


def _target(file: str, link: str, texts: Mapping[str, str], shown: dict[str, str]) -> str:
    """The link, or where it leads to a file that is not a page, the link to the page that shows it."""
    target = normpath(Path(file).parent / link)
    path = ROOT / target
    if target in texts or not path.exists() or path.suffix in (".png", ".svg"):
        return link  # a page, or nothing at all, which mkdocs reports
    if path.is_dir() and f"{target}/README.md" in texts:
        return f"{link.rstrip('/')}/README.md"
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
