"""`composer-plugins conform verl` with the installed verl: from a wheel, and the table of docs/parity.md."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from composer_plugins.cli import app
from composer_plugins.conformance.claims import GRADIENT, VALUE, Claim
from composer_plugins.conformance.verl_claims.suite import suite
from docs.generator.written import part
from parity_tests.rigs import installed
from parity_tests.rigs.claims import could_fail

SUITE = suite()


def test_the_wheel_compares_every_loss_where_the_checkout_is_not(tmp_path: Path) -> None:
    done = installed.run(installed.unpacked(tmp_path), "conform", "verl", "--json", "--cases", "2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert found["version"] == version("verl") and not found["new"]
    compared = [row for row in found["rows"] if row["loss"]]
    assert len(compared) > 60
    assert {(row["status"], row["cases"]) for row in compared} == {("equal", 2)}


@pytest.mark.parametrize("claim", SUITE.claims, ids=str)
def test_a_difference_of_a_thousandth_would_be_noticed(claim: Claim) -> None:
    assert could_fail(claim, VALUE)
    assert claim.kind in ("advantage", "correction") or could_fail(claim, GRADIENT)


def test_a_change_in_verl_is_a_row_that_differs_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    own = POLICY_LOSS_REGISTRY["cispo"]

    def changed(**keywords: Any) -> Any:
        loss, metrics = own(**keywords)
        return loss * (1 + 1e-9), metrics

    changed.__module__ = own.__module__
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "cispo", changed)
    done = CliRunner().invoke(app, ["conform", "verl", "--loss", "cispo", "--loss", "dro", "--json"])
    (found,) = json.loads(done.stdout)
    assert done.exit_code == 1
    assert {row["upstream"]: row["status"] for row in found["rows"]} == {"cispo": "differs", "dro": "equal"}


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints() -> None:
    part("docs/parity.md", "verl").check()
