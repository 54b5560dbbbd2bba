"""The sessions on checkouts, which CI cannot run, ran on the files that are here."""

import json
import shutil
from pathlib import Path

import pytest

from parity_tests import checkouts
from parity_tests.rigs import records
from parity_tests.rigs.paths import ROOT

REPORT = '<testsuites><testsuite tests="5" skipped="2" failures="0" errors="0"/></testsuites>'


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


def test_every_folder_that_a_session_covers_has_files() -> None:
    for session in records.SESSIONS.values():
        for one in session.covers:
            assert (ROOT / one).is_file() or [*(ROOT / one).rglob("*.py")], one


@pytest.mark.parametrize("arguments", [[], ["PRIME_RL"], ["axolotl=DIR"], ["VERL=DIR"]])
def test_what_cannot_be_run_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert checkouts.main(arguments) == 2
    assert "make checkouts [PRIME_RL=DIR] [NEMO_RL=DIR]" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_only_a_session_that_passed_is_recorded(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> object:
        Path(command[-1].partition("=")[2]).write_text(REPORT)
        return type("Done", (), {"returncode": status})

    monkeypatch.setattr(checkouts.subprocess, "run", run)
    monkeypatch.setattr(checkouts, "commit_of", lambda source: source.name)
    monkeypatch.setattr(records, "RECORD", tmp_path / "checkouts.json")
    records.RECORD.write_text("{}")
    assert checkouts.main([f"SLIME={tmp_path}/a:{tmp_path}/b"]) == status
    found = json.loads(records.RECORD.read_text())
    if status == 0:
        (slime,) = found.values()
        assert slime["files"] == records.digest(records.CHECKOUTS["slime"].covers)
        assert [(one["commit"], one["passed"], one["skipped"]) for one in slime["runs"]] == [
            ("a", 3, 2),
            ("b", 3, 2),
        ]
    else:
        assert found == {}
