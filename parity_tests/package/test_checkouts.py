"""The sessions on checkouts, which CI cannot run, ran on the files that are here."""

import shutil
from pathlib import Path

import pytest

from parity_tests.rigs import records
from parity_tests.rigs.paths import ROOT


def test_each_session_on_a_checkout_ran_on_these_files() -> None:
    if names := records.stale(records.records()):
        pytest.fail(f"files have changed since these sessions ran: {records.command(names)}")


@pytest.mark.parametrize("name", records.CHECKOUTS)
def test_a_changed_line_in_an_adapter_makes_the_record_stale(name: str, tmp_path: Path) -> None:
    covers = records.CHECKOUTS[name].covers
    for one in covers:
        copy = shutil.copytree if (ROOT / one).is_dir() else shutil.copy2
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / one, tmp_path / one)
    recorded = {name: {"files": records.digest(covers, tmp_path)}}
    assert name not in records.stale(recorded, tmp_path)
    file = next((tmp_path / covers[0]).rglob("loss.py"))
    file.write_text(file.read_text() + "# one more line\n")
    assert name in records.stale(recorded, tmp_path)
