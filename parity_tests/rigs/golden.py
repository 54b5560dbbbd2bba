"""Read the numbers recorded from upstream code: `golden/NAME.json`, with their origin and their cases.

`@claim("simpo")` makes a test run over the cases of one file. `pytest -m golden --golden-dir DIR`
runs the same tests on another directory of this layout: a new upstream release, or more cases.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parity_tests.rigs.paths import GOLDEN

directory = GOLDEN  # conftest.py sets it from --golden-dir, before any test module is imported

Case = dict[str, Any]


class Claim(NamedTuple):
    """A test, and the function that selects its cases."""

    where: Callable[[Case], bool]
    test: Callable[..., Any]


CLAIMS: dict[str, list[Claim]] = {}

# Recorded numbers that no test compares: file, pattern of the paths of keys in a case, reason.
_LOGGED = (
    "logged upstream and by no kernel: adapters/prime_rl_plugin/test_golden.py compares what its adapter logs"
)
NOT_COMPARED: dict[str, dict[str, str]] = {
    "taid_loss": {
        "grad_teacher_if_not_detached": "a gradient upstream would have if it did not detach its teacher: "
        "ours is detached too (losses/test_laws.py: gradient_reaches_the_trained_inputs_only)"
    },
    **{
        f"prime_rl{name}": dict.fromkeys(("metrics.*_kl", *others), _LOGGED)
        for name, *others in (
            ("_losses",),
            *((f"/v0.{minor}.0", "metrics.nll") for minor in (5, 6, 8)),
            ("/v0.4.0", "metrics.geo_*", "metrics.sequence_*", "metrics.is_masked_*"),
        )
    },
}


def use(where: Path) -> None:
    """Read the cases from this directory from now on; UsageError if it has none of our files."""
    global directory
    if not names(where) & names(GOLDEN):
        found = ", ".join(sorted(names(where))) or "no .json at all"
        raise pytest.UsageError(
            f"--golden-dir {where} holds none of the files of {GOLDEN} ({found}): nothing would be checked"
        )
    directory = where.resolve()


def not_checked() -> list[str]:
    """The names of our golden files that the directory in use does not have."""
    return sorted(names(GOLDEN) - names(directory))


@functools.cache
def load(name: str) -> tuple[Case, ...]:
    """The cases of one golden file; none if the directory in use does not have it."""
    record = _record(name)
    cases = record["cases"] if "cases" in record else _without_inputs(record)
    return tuple({"file": name, **case} for case in cases)


def beside(name: str, key: str) -> tuple[Case, ...]:
    """Another key of a golden file than its cases; empty if the directory in use does not have the file."""
    record = _record(name)
    return tuple(record[key]) if record["cases"] else ()


def _record(name: str) -> dict[str, Any]:
    path = directory / f"{name}.json"
    if directory != GOLDEN and not path.exists():
        return {"cases": []}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def is_nan(case: Case) -> bool:
    """Whether upstream's loss is NaN: of a batch without an unmasked token, or of an impossible entry."""
    return bool(case["loss"] == "nan")


def is_number(case: Case) -> bool:
    """Whether upstream's loss is a number."""
    return not is_nan(case)


def _without_inputs(record: Case) -> list[Case]:
    """Read a file of PRIME-RL: results of sequences and of packs, whose inputs are in another file."""
    single = [{"id": f"{r['case']}-{r['fn']}", **r} for r in record["per_sequence"]]
    return single + [{"id": f"pack{r['pack']}-{r['mode']}", **r} for r in record["packed"]]


def claim(*names: str, where: Callable[[Case], bool] = lambda case: True) -> Callable[..., Any]:
    """Parametrize a test by `case`: those of `golden/NAME.json` that `where` selects, of each name.

    `case["file"]` is the name.
    """
    cases = []
    for name in names:
        of_file = [case for case in load(name) if reads(where, case)]
        cases += [pytest.param(case, id=f"{name}-{case_id(case)}") for case in of_file]
        if not of_file and directory != GOLDEN:
            skipped = pytest.mark.skip(f"{directory} has no such case")
            cases.append(pytest.param(None, id=name, marks=skipped))

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            CLAIMS.setdefault(name, []).append(Claim(where, test))
        return pytest.mark.golden(pytest.mark.parametrize("case", cases)(test))

    return decorate


def reads(where: Callable[[Case], bool], case: Case) -> bool:
    """Whether a test reads a case. It reads one without the key that selects it too, and then fails."""
    try:
        return where(case)
    except KeyError:
        return True


def names(where: Path) -> set[str]:
    """The names of the golden files below a directory, as `claim` takes them."""
    return {path.relative_to(where).with_suffix("").as_posix() for path in where.rglob("*.json")}


def unclaimed(name: str) -> list[Case]:
    """The cases of a file that no test reads."""
    claims = CLAIMS.get(name, [])
    return [case for case in load(name) if not any(reads(claim.where, case) for claim in claims)]


def dtype(case: Case) -> torch.dtype:
    """The dtype of a recording: float64 unless the case names one."""
    return getattr(torch, case.get("dtype", "torch.float64").removeprefix("torch."))


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert nested lists to a tensor; the files have "nan", "inf" and "-inf" for those numbers."""
    return torch.tensor(_numbers(values), dtype=dtype)


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(v) for v in values]
    return float(values) if isinstance(values, str) else values


def case_id(case: Case) -> str:
    """The id of a case in the names of tests."""
    return f"{case['id']}" + (f"-{case['edge']}" if case.get("edge") else "")
