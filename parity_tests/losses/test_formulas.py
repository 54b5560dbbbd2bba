"""Every loss has its formula in TeX, which names only what the loss has."""

import re
import tomllib

import pytest

from composer_plugins.losses import bundled
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss
from parity_tests.rigs.every import row_id
from parity_tests.rigs.paths import ROOT

NAME = re.compile(r"\\text\{([a-z]+(?:\\_[a-z]+)+)\}")  # of a parameter or an input: it has an underscore


@pytest.mark.parametrize("loss", losses(), ids=row_id)
def test_a_loss_has_a_formula_of_its_own_parameters_and_inputs(loss: Loss) -> None:
    assert loss.tex.strip()
    for line in loss.tex.strip().splitlines():
        assert line.count("{") == line.count("}") and line.count(r"\left") == line.count(r"\right"), line
        assert line.count(r"\begin") == line.count(r"\end"), line
    named = {name.replace(r"\_", "_") for name in NAME.findall(loss.tex)}
    assert named <= {*loss.parameters, *loss.needs, *loss.optional}


def test_the_file_of_formulas_has_no_row_of_a_loss_that_is_gone() -> None:
    table = tomllib.loads((ROOT / "composer_plugins/losses/bundled/formulas.toml").read_text())
    listed = (loss for family in bundled.FAMILIES for loss in family.LOSSES)
    rows = {(loss.kind, loss.name) for loss in listed if not loss.tex}  # others have it in their row
    assert {(kind, name) for kind, names in table.items() for name in names if name != "shared"} == rows
