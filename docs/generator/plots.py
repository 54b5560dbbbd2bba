"""The picture of each loss, light and dark. One that is drawn already is kept below build/plots."""

import hashlib
from dataclasses import replace
from pathlib import Path

from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import Loss
from composer_plugins.plotting import drawing, picture
from docs.generator.written import ROOT

KEPT = ROOT / "build" / "plots"
CODE = Path(drawing.__file__).read_bytes()
SCHEMES = {"light": False, "dark": True}


def files() -> dict[str, Path]:
    """The drawn picture of each loss and scheme, by its file in the site's sources."""
    KEPT.mkdir(parents=True, exist_ok=True)
    found = {}
    for loss in registry().losses:
        drawn = picture(loss.name, kind=loss.kind)
        drawn = replace(drawn, columns=min(2, drawn.columns))  # three would be small beside the navigation
        for scheme, dark in SCHEMES.items():
            name = hashlib.sha256(repr(drawn).encode() + CODE + scheme.encode()).hexdigest()[:24]
            path = KEPT / f"{name}.svg"
            if not path.exists():
                drawing.write(drawn, path, dark=dark)
            found[f"losses/{loss.kind}/{_file(loss, scheme)}"] = path
    return found


def section(loss: Loss) -> str:
    """The picture on the page of its loss, which opens in full when it is clicked."""
    text = f"{loss.name}: its value and gradient, with all its dialects"
    images = [
        f"[![{text}]({_file(loss, scheme)}#only-{scheme})]({_file(loss, scheme)})" for scheme in SCHEMES
    ]
    return '<div class="plot" markdown>\n\n' + "\n".join(images) + "\n\n</div>"


def _file(loss: Loss, scheme: str) -> str:
    return f"{loss.name}-{scheme}.svg"
