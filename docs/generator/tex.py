"""The formula of a loss in TeX, a display to a line: that of its row, or else of formulas.toml."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from composer_plugins.losses.row import Loss

FILE = Path(__file__).with_name("formulas.toml")


@cache
def table() -> dict[str, dict[str, Any]]:
    """The formulas of the file by kind and name, with the `shared` displays of each kind."""
    return tomllib.loads(FILE.read_text())


def tex(loss: Loss) -> str:
    """The displays of a formula, with each shared one in the place of its name."""
    if loss.tex:
        return loss.tex
    formulas = table()[loss.kind]
    found = formulas.get(loss.name, "")
    displays = found.strip().splitlines() if isinstance(found, str) else found
    return "\n".join(formulas.get("shared", {}).get(display, display) for display in displays)
