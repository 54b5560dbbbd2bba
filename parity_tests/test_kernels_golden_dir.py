"""Every recording is claimed, and the claims run on another directory of the same layout."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from parity_tests import golden

HERE = Path(__file__).parent
MODULES = sorted(HERE.glob("test_kernels_*golden*.py"))


@pytest.fixture(scope="module", autouse=True)
def _every_claim() -> None:
    for path in MODULES:
        if path.stem != Path(__file__).stem:
            import_module(f"parity_tests.{path.stem}")


@pytest.mark.golden
def test_every_case_of_every_file_is_claimed() -> None:
    for name in sorted(golden.names(golden.directory)):
        assert name in golden.CLAIMS, f"{golden.directory / name}.json is read by no claim"
        cases = [golden.case_id(case) for case in golden.unclaimed(name)]
        assert not cases, f"{golden.directory / name}.json: no claim reads the cases {', '.join(cases)}"


def test_every_claim_has_its_file() -> None:
    assert set(golden.CLAIMS) == golden.names(golden.GOLDEN)


@contextmanager
def copied(tmp_path: Path, *names: str) -> Iterator[Path]:
    """A golden directory that holds these files only."""
    where = tmp_path / "golden"
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(golden.GOLDEN / f"{name}.json", where / f"{name}.json")
    yield where


def run(where: Path, *paths: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "golden", "--golden-dir", str(where)]
    options = ["-p", "no:cacheprovider", "-rf", "--tb=short", *map(str, paths or MODULES)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=HERE.parent)
    return done.returncode, done.stdout + done.stderr


def test_the_claims_pass_on_a_copied_directory(tmp_path: Path) -> None:
    with copied(tmp_path, "verl_policy_gspo", "simpo") as where:
        status, output = run(where, HERE)
    assert status == 0, output[-3000:]
    cases = sum(len(golden.load(name)) for name in ("verl_policy_gspo", "simpo"))
    assert f"{cases + 1} passed" in output or int(output.split(" passed")[0].split()[-1]) > cases


def test_a_corrupted_number_fails_and_names_its_file_its_case_and_the_error(tmp_path: Path) -> None:
    with copied(tmp_path, "verl_policy_gspo", "simpo") as where:
        path = where / "verl_policy_gspo.json"
        data = json.loads(path.read_text())
        data["cases"][3]["loss"] += 0.125
        path.write_text(json.dumps(data))
        status, output = run(where)
    assert status == 1
    (failure,) = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert f"verl_policy_gspo-{golden.case_id(data['cases'][3])}" in failure
    assert "max error 0.125" in output
    assert "simpo" not in failure


def test_a_file_that_no_claim_reads_fails(tmp_path: Path) -> None:
    with copied(tmp_path, "simpo") as where:
        shutil.copy(where / "simpo.json", where / "new_upstream.json")
        status, output = run(where)
    assert status == 1
    assert "new_upstream.json is read by no claim" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [("{not json", "is no golden file: JSONDecodeError"), ('{"doc": ""}', "is no golden file: KeyError")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with copied(tmp_path, "simpo") as where:
        (where / "simpo.json").write_text(text)
        status, output = run(where)
    assert status != 0
    assert f"simpo.json {message}" in output


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    status, output = run(tmp_path / "nowhere")
    assert status != 0 and "is no directory" in output
