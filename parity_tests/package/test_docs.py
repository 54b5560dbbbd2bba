"""What the documents say of the code: that it exists, and how much of it there is."""

import re

from parity_tests.planted_bugs import bugs, not_plantable
from parity_tests.rigs.paths import ROOT, TESTS

DIVERGENCES = [x for x in (TESTS / "divergences.md").read_text().splitlines() if x.startswith("| ")]


def test_every_known_divergence_is_held_by_a_test_that_exists() -> None:
    tests = re.findall(r"([\w./]+): `(test_\w+)`", " ".join(row.split(" | ")[0] for row in DIVERGENCES))
    gone = [f"{file}: {name}" for file, name in tests if f"def {name}(" not in (TESTS / file).read_text()]
    assert len(tests) > 40 and not gone, "\n".join(gone)


def test_every_divergence_cites_its_upstream_and_a_reason() -> None:
    for row in DIVERGENCES[1:]:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) >= 4 and all(cells[:4]), f"a cell is empty: {row[:80]}"


def test_a_kernel_file_is_in_the_contract_and_no_longer_than_a_paper_section() -> None:
    text = (ROOT / "kernels" / "README.md").read_text()
    for path in (ROOT / "kernels").rglob("*.py"):
        listed = path.name == "__init__.py" or f"{path.name}`" in text
        assert listed, f"kernels/README.md does not mention {path.name}"
        assert len(path.read_text().splitlines()) <= 250, path


def test_every_planted_bug_can_be_planted() -> None:
    gone = not_plantable(bugs())
    assert not gone, "\n".join(gone)
