"""Formulas in TeX as MathML, which a browser draws without a script, and the font that it draws them with."""

import html
import re
from collections.abc import Iterable
from pathlib import Path

import latex2mathml.converter
import ziamath
from fontTools import subset

FONT = "docs/generator/formulas.woff"
TEXT = "".join(map(chr, range(0x20, 0x7F))) + "√"  # a root has no character
FUNCTIONS = "log|min|max|exp|operatorname"


def block(tex: str) -> str:
    """Formulas on lines of their own, one to a line of `tex`. A narrow screen scrolls them."""
    displays = "".join(_mathml(line, "block") for line in tex.strip().splitlines())
    return f'<div class="formula" tabindex="0">{displays}</div>'


def inline(tex: str) -> str:
    """A formula in a line of text."""
    return _mathml(tex, "inline")


def fence(source: str, *_: object, **__: object) -> str:
    """A fence of the language "math" in a page, for pymdownx.superfences."""
    return block(source)


def _mathml(tex: str, display: str) -> str:
    """What browsers draw of a formula: MathML Core, which has fewer attributes than the converter uses."""
    tex = re.sub(rf"(?<=[\w}})|]) ?(?=\\({FUNCTIONS}))", r"\\,", tex).replace(r"\log ", r"\log\, ")
    made = latex2mathml.converter.convert(tex, display=display).replace("\\_", "_")  # in \text it stays
    made = re.sub(r"<mo>([a-z]+)</mo>", r"<mi>\1</mi>", made)  # a function is not an operator with spaces
    made = re.sub(r"<mo[^>]*>&#x0007C;</mo>", '<mo stretchy="false" lspace="0" rspace="0">|</mo>', made)
    return made.replace('<mn mathvariant="double-struck">1</mn>', "<mn>𝟙</mn>")


def font(out: Path, texts: Iterable[str]) -> str:
    """Write STIX Two Math, cut to what the formulas in these pages need; return its file below `out`."""
    source = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    options = subset.Options(flavor="woff", layout_features=["*"], notdef_outline=True)
    # Italic letters, which MathML makes of single ones; h is Planck's constant in Unicode.
    letters = [chr(code) for code in (*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C), 0x210E)]
    wanted = set(TEXT).union(*map(html.unescape, texts), letters)
    with subset.load_font(str(source), options) as face:
        subsetter = subset.Subsetter(options)
        subsetter.populate(text="".join(wanted))
        subsetter.subset(face)
        (out / FONT).parent.mkdir(parents=True, exist_ok=True)
        subset.save_font(face, str(out / FONT), options)
    return FONT
