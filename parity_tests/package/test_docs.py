"""What the documents say of the code: that it exists, and how much of it there is."""

import re

from parity_tests.planted_bugs import bugs, not_plantable
from parity_tests.rigs.paths import ROOT, TESTS


def test_every_known_divergence_is_held_by_a_test_that_exists() -> None:
    rows = [line for line in (TESTS / "divergences.md").read_text().splitlines() if line.startswith("| ")]
    missing = []
    for row in rows:
        claims = row.split(" | ")[0].removeprefix("| ")
        for claim in re.findall(r"([\w./]+): `(\w+)`|`(test_\w+)`", claims):
            file, name = claim[0], claim[1] or claim[2]
            path = TESTS / file
            if not name.startswith("test_") or (path.exists() and f"def {name}(" in path.read_text()):
                continue
            missing.append(f"{claims}: no {name} in {path.name}")
    assert len(rows) > 40
    assert not missing, "\n".join(missing)


def test_every_divergence_cites_its_upstream_and_a_reason() -> None:
    for line in (TESTS / "divergences.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| test |"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) >= 4 and all(cells[:4]), f"a cell is empty: {line[:80]}"


def test_the_contract_lists_every_kernel_file() -> None:
    text = (ROOT / "kernels" / "README.md").read_text()
    for path in (ROOT / "kernels").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"{path.name}`" in text, f"kernels/README.md does not mention {path.name}"


def test_no_kernel_file_is_longer_than_a_paper_section() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path


def test_every_planted_bug_can_be_planted() -> None:
    gone = not_plantable(bugs())
    assert not gone, "\n".join(gone)
