"""`composer-plugins conform trl` with the installed TRL: from a wheel, and the table of docs/parity.md."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from trl import GRPOTrainer
from typer.testing import CliRunner

from composer_plugins.cli import app
from composer_plugins.conformance.claims import GRADIENT, VALUE, Claim
from composer_plugins.conformance.trl_claims.suite import suite
from docs.generator.written import part
from parity_tests.rigs import installed
from parity_tests.rigs.claims import could_fail

SUITE = suite()


def test_the_wheel_compares_every_loss_where_the_checkout_is_not(tmp_path: Path) -> None:
    done = installed.run(installed.unpacked(tmp_path), "conform", "trl", "--json", "--cases", "2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert found["version"] == version("trl") and not found["new"]
    compared = [row for row in found["rows"] if row["loss"]]
    assert len(compared) > 60
    assert {(row["status"], row["cases"]) for row in compared} == {("equal", 2)}


@pytest.mark.parametrize("claim", SUITE.claims, ids=str)
def test_a_difference_of_a_thousandth_would_be_noticed(claim: Claim) -> None:
    has_value, has_gradient = claim.ours != "rloo", claim.kind not in ("advantage", "correction")
    assert not has_value or could_fail(claim, VALUE)
    assert not has_gradient or could_fail(claim, GRADIENT)


def test_a_change_in_trl_is_a_row_that_differs_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GRPOTrainer.get_gamma_weights
    monkeypatch.setattr(
        GRPOTrainer, "get_gamma_weights", staticmethod(lambda *a, **k: own(*a, **k) * (1 + 1e-9))
    )
    done = CliRunner().invoke(app, ["conform", "trl", "--loss", "vespo", "--loss", "cispo@trl", "--json"])
    (found,) = json.loads(done.stdout)
    assert done.exit_code == 1
    statuses = {row["upstream"]: row["status"] for row in found["rows"]}
    vespo = dict.fromkeys(("GRPOTrainer vespo", "GRPOTrainer vespo, sequence"), "differs")
    assert statuses == vespo | {"GRPOTrainer cispo": "equal"}


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints() -> None:
    part("docs/parity.md", "trl").check()
