"""The rows of parity_tests/divergences.md that concern one loss."""

import re
from functools import cache

from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import Loss
from docs.generator.markdown import table
from docs.generator.written import ROOT

FILE = "parity_tests/divergences.md"
TEXT = (ROOT / FILE).read_text()


def section(loss: Loss, up: str) -> str:
    """The differences on purpose between this loss and its upstreams, or "" if the list has none."""
    rows = of(loss)
    if not rows:
        return ""
    head = "## Known differences\n\nEach is on purpose and held by a test. The whole list: "
    return f"{head}[differences on purpose]({up}{FILE}).\n\n" + table(
        ("upstream", "what differs", "why", "test"),
        [(upstream, what, why, tests) for tests, upstream, what, why in rows],
    )


def of(loss: Loss) -> list[tuple[str, ...]]:
    """The cells of each row that proves a claim of this loss or names it."""
    proofs = {one.proof.partition("::")[2] for one in (loss, *loss.dialects)} - {""}
    pattern = re.compile(rf"(?<![a-z0-9-]){re.escape(loss.name)}s?(?![a-z0-9-]|_plus)")
    return [
        row for row in _rows() if any(f"`{one}`" in row[0] for one in proofs) or _names(row, loss, pattern)
    ]


def _names(row: tuple[str, ...], loss: Loss, pattern: re.Pattern[str]) -> bool:
    """Whether a row names the loss; a policy loss and an advantage may share their name."""
    text = re.sub(r"\S+\.py\S*", "", " ".join(row[:3])).lower()
    shared = sum(one.name == loss.name for one in registry().losses) > 1
    other = shared and ("advantage" in " ".join(row[:2])) != (loss.kind == "advantage")
    return bool(pattern.search(text)) and not other and "adapters/trl" not in row[0]


@cache
def _rows() -> list[tuple[str, ...]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| test |")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | "))[:4] for line in lines]
