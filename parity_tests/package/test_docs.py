"""What the documents say of the code: that it exists, and how much of it there is."""

import math
import re

import torch

from composer_plugins.testing.assertions import assert_parity
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


def test_the_example_of_writing_a_loss_follows_the_rules_of_that_page() -> None:
    """An overflow, and a NaN at a masked token, in the value and in the gradient."""
    program = (ROOT / "docs/writing_a_loss.md").read_text().split("```python")[1].split("```")[0]
    exec(program, names := {})
    logprobs = torch.tensor([-1.0, -1.0, torch.nan], requires_grad=True)
    old, advantages = torch.tensor([-200.0, -1.5, torch.nan]), torch.tensor([0.0, -2.0, torch.nan])
    mask = torch.tensor([True, True, False])
    loss = names["half_negative"](logprobs, old, advantages, mask, scale=0.25).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    weight = math.exp(0.5) * 0.25
    assert_parity(loss, torch.tensor([0.0, 2 * weight * -1.0, 0.0]), terms=3, dtype=torch.float32)
    assert_parity(gradient, torch.tensor([0.0, 2 * weight, 0.0]), terms=3, dtype=torch.float32)


def test_no_kernel_file_is_longer_than_a_paper_section() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path


def test_every_planted_bug_can_be_planted() -> None:
    gone = not_plantable(bugs())
    assert not gone, "\n".join(gone)
