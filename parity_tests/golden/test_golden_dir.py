"""Every recorded number is claimed, and the claims run on another directory of the same layout."""

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case
from parity_tests.rigs.paths import GOLDEN, ROOT, TESTS
from parity_tests.rigs.programs import python

FILES = [*sorted(GOLDEN.glob("test_*.py")), *sorted((TESTS / "kernels").glob("test_*.py"))]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in FILES
    if "\n@claim(" in path.read_text()
}
INPUTS = {"prime_rl/inputs"}  # of the claims on the other files of prime_rl
Keys = tuple[str, ...]


@pytest.fixture(scope="module", autouse=True)
def _every_claim() -> None:
    for module in MODULES:
        import_module(module)


@pytest.mark.golden
def test_every_case_of_every_file_is_claimed() -> None:
    found = sorted(golden.names(golden.directory) - INPUTS)
    read = {name for name in golden.CLAIMS if golden.load(name)}
    unread = [f"{golden.directory / name}.json" for name in found if name not in read]
    if unread:
        pytest.fail(f"read by no claim: {', '.join(unread)}", pytrace=False)
    left = {name: [golden.case_id(case) for case in golden.unclaimed(name)] for name in found}
    lines = [
        f"{golden.directory / name}.json: no claim reads the cases {', '.join(cases)}"
        for name, cases in left.items()
        if cases
    ]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_every_claim_has_its_file() -> None:
    assert set(golden.CLAIMS) == golden.names(golden.GOLDEN) - INPUTS


def numbers(record: Any, at: Keys = ()) -> Iterator[Keys]:
    """The paths of a case's keys that hold floats; a list of objects is one of them many times."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from numbers(value, (*at, key))
    elif isinstance(record, list) and record and isinstance(record[0], dict):
        for entry in record:
            yield from numbers(entry, at)
    elif holds_float(record):
        yield at


def holds_float(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(holds_float, value))
    return isinstance(value, float) or value in ("nan", "inf", "-inf")


def moved(record: Any, at: Keys, move: Callable[[float], float]) -> Any:
    """The record with every number at this path moved."""
    if isinstance(record, list):
        return [moved(entry, at, move) for entry in record]
    if at:
        return record | {at[0]: moved(record[at[0]], at[1:], move)} if at[0] in record else record
    is_number = isinstance(record, int | float) and not isinstance(record, bool)
    return move(record) if is_number else record


def is_noticed(name: str, case: Case) -> bool:
    """Whether a claim on kernels fails of this case."""
    for claim in golden.CLAIMS[name]:
        if claim.test.__module__ not in MODULES:
            continue  # an adapter's
        if golden.reads(claim.where, case):
            try:
                claim.test(case=case)
            except Exception:
                return True
    return False


MOVES = ((lambda x: x + 0.125 * (1 + abs(x))), (lambda x: x / 64 - 0.125), (lambda x: 4 * x + 1))
PARAMETERS = {"kwargs", "config", "hp"}


def unread(name: str) -> set[str]:
    """The keys of a file whose numbers may be moved in every case, and no claim fails.

    A result is moved in one way, and a parameter, which may be a bound far from any token, in three.
    """
    holders: dict[Keys, list[Case]] = {}
    for case in golden.load(name):
        for at in set(numbers(case)):
            holders.setdefault(at, []).append(case)
    return {
        ".".join(at)
        for at, cases in holders.items()
        if not any(
            is_noticed(name, moved(case, at, move))
            for move in MOVES[: len(MOVES) if at[0] in PARAMETERS else 1]
            for case in cases
        )
    }


@pytest.mark.slow
def test_every_recorded_number_is_read_or_declared_not_to_be() -> None:
    found = {name: keys for name in golden.CLAIMS if (keys := unread(name))}
    for name, reasons in golden.NOT_COMPARED.items():
        declared = {pattern: fnmatch.filter(found[name], pattern) for pattern in reasons}
        assert all(reasons.values()) and all(declared.values())
        found[name] = found[name].difference(*declared.values())
    assert not any(found.values()), found


def copied(tmp_path: Path, *names: str) -> Path:
    """A golden directory that holds these files only."""
    where = tmp_path / "golden"
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(golden.GOLDEN / f"{name}.json", where / f"{name}.json")
    return where


def run(where: Path, *paths: Path) -> tuple[int, str]:
    options = ["-p", "no:cacheprovider", "-rf", "--tb=short", *map(str, paths)]
    done = python("-m", "pytest", "-q", "-m", "golden", "--golden-dir", str(where), *options)
    return done.returncode, done.stdout + done.stderr


def test_a_failure_names_the_file_the_case_and_the_error(tmp_path: Path) -> None:
    """A number that is wrong, one that is not there, and a file that no claim reads."""
    where = copied(tmp_path, "vespo", "simpo", "taid_loss")
    shutil.copy(where / "simpo.json", where / "new_upstream.json")
    path, wrong = where / "vespo.json", json.loads((where / "vespo.json").read_text())
    wrong["cases"][3]["loss"] += 0.125
    path.write_text(json.dumps(wrong))
    path, short = where / "taid_loss.json", json.loads((where / "taid_loss.json").read_text())
    del short["cases"][1]["loss"]
    path.write_text(json.dumps(short))
    status, output = run(where, *MODULES.values(), Path(__file__))
    assert status == 1 and f"read by no claim: {where}/new_upstream.json" in output
    absent = golden.names(golden.GOLDEN) - {"vespo", "simpo", "taid_loss"}
    line = f"golden: {len(absent)} files not in {where}, so not checked: {', '.join(sorted(absent))}"
    assert line in output
    failures = [line for line in output.splitlines() if line.startswith("FAILED") and "[" in line]
    of_vespo, *of_taid = sorted(failures, key=lambda line: "taid_loss" in line)
    assert of_taid and all("taid_loss" in line for line in of_taid)
    case = golden.case_id(wrong["cases"][3])
    assert f"vespo-{case}" in of_vespo
    assert "loss: 1 of 1 differ" in output and "max error 0.125" in output
    case = golden.case_id(short["cases"][1])
    assert any(f"taid_loss-{case}" in line for line in of_taid) and "KeyError: 'loss'" in output


def test_a_directory_without_our_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "directory", golden.GOLDEN)
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(pytest.UsageError, match=r"holds none of the files of .* \(no .json at all\)"):
            golden.use(where)
    (tmp_path / "new_upstream.json").write_text("{}")
    with pytest.raises(pytest.UsageError, match=r"\(new_upstream\): nothing would be checked"):
        golden.use(tmp_path)
    assert golden.directory == golden.GOLDEN and not golden.not_checked()
