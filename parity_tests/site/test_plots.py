"""The pictures of the losses: no text of one covers another text, or is cut at the edge."""

import re
from pathlib import Path
from typing import Any

from composer_plugins.plotting import drawing, picture
from docs.generator import plots

NAME = re.compile(r"(?<=[\"#]m)[0-9a-f]{10}")  # of a mark: a hash of its shape and colour

# The texts that leave the picture, and the pairs whose boxes share more than half a pixel of each side.
FAULTS = """svg => {
    document.body.innerHTML = svg
    const edge = document.querySelector("svg").getBoundingClientRect()
    const texts = [...document.querySelectorAll("text")]
    const boxes = texts.map(one => [one.textContent, one.getBoundingClientRect()])
    const found = boxes.filter(([, box]) => box.left < edge.left || box.right > edge.right
        || box.top < edge.top || box.bottom > edge.bottom).map(([text]) => `${text} is cut`)
    for (const [i, [text, a]] of boxes.entries())
        for (const [other, b] of boxes.slice(i + 1))
            if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > .5
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > .5)
                found.push(`${text} and ${other} overlap`)
    return [boxes.length, found]
}"""


def test_no_text_of_a_picture_covers_another_or_is_cut(site: Path, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    faults = []
    for file in sorted(site.glob("losses/*/*-light.svg")):
        svg = file.read_text()
        texts, found = tab.evaluate(FAULTS, svg[svg.index("<svg") :])
        assert texts > 8, file
        faults += [f"{file.relative_to(site)}: {one}" for one in found]
    tab.close()
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])


def test_a_dark_picture_has_the_colours_of_one_that_is_drawn_dark(tmp_path: Path) -> None:
    drawn, light, dark = picture("cispo", kind="policy"), tmp_path / "light.svg", tmp_path / "dark.svg"
    drawing.write(drawn, light)
    drawing.write(drawn, dark, dark=True)
    one, other = (NAME.sub("", text) for text in (plots.darkened(light.read_text()), dark.read_text()))
    assert one == other
